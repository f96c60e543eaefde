"""What is left to remove once a batch has ended? Its parts, and result files that do not count."""

from sqlalchemy import select

from service.batch import StageName
from service.db import queue, removals
from service.db.models import Batch, File
from service.places import parts_prefix, results_prefix
from worker.lease import KeptLease
from worker.resources import Resources
from worker.stages import run_ready


def clean_ready(resources: Resources) -> None:
    """Every clean stage that is ready; while a backup is made they stay so."""
    with removals.allowed(resources.database.engine) as may:
        if may:
            run_ready(resources, StageName.CLEAN, clean)


def clean(resources: Resources, kept: KeptLease) -> None:
    """Remove all parts, recorded or orphaned, for the files hold what was in them; and the result
    files that are empty, or left by an assembly that did not get to its end."""
    batch_id, storage = kept.lease.batch_id, resources.storage
    with resources.database.transaction() as transaction:
        published = set(
            transaction.scalars(
                select(File.storage_key)
                .join(Batch, File.id.in_([Batch.output_file_id, Batch.error_file_id]))
                .where(Batch.id == batch_id)
            )
        )
    storage.delete(storage.list(parts_prefix(batch_id.hex)))
    written = storage.list(results_prefix(batch_id.hex))
    storage.delete(key for key in written if key not in published)
    with resources.database.transaction() as transaction:
        queue.settle(transaction, kept.lease)
