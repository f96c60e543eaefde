"""What is left to remove once a batch has ended? Its parts, recorded or orphaned."""

from service.db import queue
from worker.lease import KeptLease
from worker.resources import Resources
from worker.write_back import parts_prefix


def clean(resources: Resources, kept: KeptLease) -> None:
    """Remove every object under the batch's parts prefix; the files hold all that was in them."""
    storage = resources.storage
    storage.delete(storage.list(parts_prefix(kept.lease.batch_id.hex)))
    with resources.database.transaction() as transaction:
        queue.settle(transaction, kept.lease)
