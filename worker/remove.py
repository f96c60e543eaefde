"""What goes with a batch that its project deleted? Its lines, shards, parts and texts.

The bytes of its result files are the sweep's, as of every deleted file; those of its parts were
removed when it ended.
"""

from service.db import batches, lines, queue
from worker.lease import KeptLease
from worker.resources import Resources

LINES_AT_ONCE = 20_000
"""A transaction of so many is short: nobody waits for it, and vacuum can follow."""


def remove(resources: Resources, kept: KeptLease) -> None:
    """Delete the rows, lines first, some at a time. What is gone stays so if this ends early."""
    batch_id = kept.lease.batch_id
    last: int | None = 0
    while last is not None:
        kept.check()
        with resources.database.transaction() as transaction:
            last = lines.remove(transaction, batch_id, after=last, limit=LINES_AT_ONCE)
    with resources.database.transaction() as transaction:
        queue.lock_batch(transaction, batch_id)
        queue.settle(transaction, kept.lease)
        batches.forget(transaction, batch_id)
