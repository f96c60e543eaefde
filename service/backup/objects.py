"""How are many objects copied out of a store and into one? Some side by side, in their order."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from typing import TypeVar

from service.backup.archive import Archive, BackupError, Entry, sha256_of
from service.settings import MIB
from service.storage import MissingObject, Storage

T = TypeVar("T")
R = TypeVar("R")

SIDE_BY_SIDE = 8
AT_ONCE = 64
"""Copies that are waited for together: what is ahead of the slowest of them is bounded."""


def copy_out(storage: Storage, archive: Archive, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Copy each object into the archive; answers what became of it, in the same order.

    Raises:
        StorageError: the store failed.
        OSError: the archive's disk is full, for one.
    """
    return _side_by_side(lambda each: _copy_out(storage, archive, each), entries)


def _copy_out(storage: Storage, archive: Archive, entry: Entry) -> Entry:
    path = archive.bytes_of(entry.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = sha256(), 0
    try:
        with path.open("wb") as file:
            for piece in storage.stream(entry.key):
                digest.update(piece)
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except MissingObject:
        size = -1
    if size != entry.bytes:
        # Bytes that are not those that the row speaks of would be read as if they were.
        path.unlink()
        return entry.model_copy(update={"missing": True})
    return entry.model_copy(update={"sha256": digest.hexdigest()})


def copy_in(archive: Archive, storage: Storage, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Put each object back into the store, those that the archive has not left out.

    Raises:
        BackupError: the bytes are not those that the backup was made with.
        StorageError: the store failed.
    """
    return _side_by_side(
        lambda entry: _copy_in(archive, storage, entry), (each for each in entries if each.sha256)
    )


def _copy_in(archive: Archive, storage: Storage, entry: Entry) -> Entry:
    path = archive.bytes_of(entry.key)
    if sha256_of(path) != entry.sha256:
        raise BackupError(f"{path} is damaged: it is not what the backup was made with.")
    with storage.writer(entry.key) as writer, path.open("rb") as file:
        while piece := file.read(MIB):
            writer.write(piece)
    return entry


def absent(storage: Storage, entries: Iterable[Entry]) -> int:
    """How many of these objects the store lacks, or has in another size."""

    def is_absent(entry: Entry) -> bool:
        try:
            return storage.size(entry.key) != entry.bytes
        except MissingObject:
            return True

    return sum(_side_by_side(is_absent, entries))


def _side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    remaining = iter(items)
    with ThreadPoolExecutor(SIDE_BY_SIDE, "copy") as pool:
        while some := list(islice(remaining, AT_ONCE)):
            yield from pool.map(work, some)
