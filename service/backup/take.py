"""How is a backup made, beside a running service or without one?

The state of one moment is dumped, then the objects that it names are copied. Objects are put before
the rows that name them and never changed, and none that a row names is removed meanwhile
(`service.db.removals`): so all of them are there, however long the copying takes.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from service.backup.archive import FORMAT, Archive, BackupError, Entry, Manifest, sha256_of
from service.backup.dump import dump
from service.backup.objects import copy_out
from service.db.removals import held_off
from service.db.session import Database
from service.db.snapshot import snapshot
from service.settings import Settings
from service.stack.choice import brought_parts
from service.stack.home import Home, holder, locked
from service.stack.record import read_record
from service.stack.stores import STORES, running_stores
from service.stack.supervisor import settings_of
from service.storage import Storage

Say = Callable[[str], None]

OWN_TOOLS = (
    "Postgres or the S3 store is brought by URL: `halfrate backup` and `halfrate restore` are for "
    "the embedded ones. docs/deploy.md says how the others are backed up."
)


def take(home: Home, folder: Path, *, with_bytes: bool, say: Say) -> Manifest:
    """Make a backup of that home in `folder`, which is there as a whole or not at all.

    Raises:
        BackupError: it cannot be made.
        StackError: the stores of a stack that is down did not start.
        StorageError, sqlalchemy.exc.SQLAlchemyError, OSError: what was read or written failed.
    """
    if folder.exists():
        raise BackupError(f"{folder} is there already; a backup is made in a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Of mode 700, whatever stands beside it.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _stores(home) as settings:
            manifest = write(settings, Archive(unfinished), with_bytes=with_bytes, say=say)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return manifest


def write(settings: Settings, archive: Archive, *, with_bytes: bool, say: Say) -> Manifest:
    """Write a backup of the database and the bucket that the settings name."""
    url = settings.database_url.get_secret_value()
    with (
        closing(Database(url, pool=2, application="halfrate backup")) as database,
        closing(Storage.from_settings(settings)) as storage,
        held_off(database.engine),
    ):
        with snapshot(database.engine) as moment:
            say("Writing the state …")
            dump(url, moment.name, archive.dump)
            archive.write_listing(Entry(key=key, bytes=size) for key, size in moment.objects())
            made_at, revision = moment.at, moment.revision
        if with_bytes:
            say("Copying the objects …")
            archive.write_listing(copy_out(storage, archive, archive.entries()))
    objects, size, missing = _sums(archive.entries())
    manifest = Manifest(
        format=FORMAT,
        made_at=made_at,
        halfrate=_version(),
        revision=revision,
        dump_sha256=sha256_of(archive.dump),
        with_bytes=with_bytes,
        objects=objects,
        bytes=size,
        missing=missing,
    )
    archive.write_manifest(manifest)
    return manifest


@contextmanager
def _stores(home: Home) -> Iterator[Settings]:
    """What the running stack works on; the stores alone where it is down."""
    record = read_record(home)
    if holder(home) is None:
        if brought_parts() & set(STORES):
            raise BackupError(OWN_TOOLS)
        if not home.has_data:
            raise BackupError(f"There is nothing to back up in {home.root}.")
        with locked(home), running_stores(home, dict.fromkeys(STORES, home.root)) as settings:
            yield settings
        return
    if not record.ready:
        raise BackupError(f"The stack of {home.root} is starting or stopping: try again later.")
    if not set(STORES) <= set(record.names):
        raise BackupError(OWN_TOOLS)
    yield settings_of(dict(record.environment))


def _sums(entries: Iterable[Entry]) -> tuple[int, int, int]:
    """How many, their bytes, how many of them are missing."""
    objects = size = missing = 0
    for entry in entries:
        objects += 1
        size += entry.bytes
        missing += entry.missing
    return objects, size, missing


def _version() -> str:
    try:
        return version("halfrate")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
