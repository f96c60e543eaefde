"""How does a home come to hold what a backup has? Beside what it holds now, then in its place."""

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from service.backup.archive import Archive, BackupError, Manifest
from service.backup.dump import load
from service.backup.objects import absent, copy_in
from service.backup.take import OWN_TOOLS, Say
from service.db.migrate import revisions
from service.settings import Settings
from service.stack.choice import brought_parts
from service.stack.home import KEPT, Home, locked
from service.stack.stores import STORES, running_stores
from service.storage import Storage


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and how many objects that the state names are not in the store."""

    manifest: Manifest
    absent: int


def restore(home: Home, folder: Path, *, replace: bool, say: Say) -> Restored:
    """Give that home the state and the bytes of the backup in `folder`; its stack must be down.

    A backup of the state alone goes beside the bytes that the home's store has.

    Args:
        home: fresh, or one whose data is to be replaced.
        folder: as `halfrate backup` made it.
        replace: give up what the home holds; until all is restored, it stays as it is.
        say: gets what a person should read.

    Raises:
        BackupError: the backup cannot be used, or the home holds data and `replace` was not said.
        HomeTaken: its stack runs.
        StackError: its stores did not start.
        StorageError, OSError: what was written failed.
    """
    if brought_parts() & set(STORES):
        raise BackupError(OWN_TOOLS)
    archive = Archive(folder)
    say("Looking whether the backup is whole …")
    manifest = archive.check_whole()
    if manifest.revision not in revisions():
        raise BackupError(
            f"{folder} was made by a newer halfrate ({manifest.halfrate}, tables of revision "
            f"{manifest.revision}; this one knows them up to {revisions()[-1]}): restore it with "
            "that one."
        )
    with locked(home):
        _check_place(home, manifest, replace=replace)
        return _restore(home, archive, manifest, say)


def _check_place(home: Home, manifest: Manifest, *, replace: bool) -> None:
    if home.has_data and not replace:
        raise BackupError(
            f"{home.root} holds data. Choose another --home, or give up what it holds with "
            "--replace."
        )
    if not manifest.with_bytes and not (home.root / "seaweedfs").exists():
        raise BackupError(
            "This backup has the state alone, so it can go only where the bytes are: into the "
            f"home that it was made of. {home.root} holds none."
        )


def _restore(home: Home, archive: Archive, manifest: Manifest, say: Say) -> Restored:
    beside = home.root / "restoring"
    shutil.rmtree(beside, ignore_errors=True)
    made = [*KEPT] if manifest.with_bytes else ["postgres"]
    places = dict.fromkeys(STORES, beside)
    if not manifest.with_bytes:
        places["seaweedfs"] = home.root
    try:
        with running_stores(home, places) as settings:
            lacking = fill(settings, archive, say)
        _put_in_place(home, beside, made)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Restored(manifest, lacking)


def fill(settings: Settings, archive: Archive, say: Say) -> int:
    """Bring state and bytes into an empty database and a bucket; how many objects are absent."""
    say("Restoring the state …")
    load(settings.database_url.get_secret_value(), archive.dump)
    with closing(Storage.from_settings(settings)) as storage:
        storage.ensure_bucket()
        say("Restoring the objects …")
        for _ in copy_in(archive, storage, archive.entries()):
            pass
        return absent(storage, archive.entries())


def _put_in_place(home: Home, beside: Path, names: list[str]) -> None:
    """Exchange these folders. Whoever is interrupted between them restores again: what was given up
    is not removed before all is in place, and a mixture does not start."""
    replaced = home.root / "replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    replaced.mkdir()
    for name in names:
        if (home.root / name).exists():
            (home.root / name).rename(replaced / name)
        (beside / name).rename(home.root / name)
    shutil.rmtree(replaced)
