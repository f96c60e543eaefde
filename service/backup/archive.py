"""What lies in a backup, where, and is it whole?

    manifest.json    what this is, how much there should be, which tables the state has
    state.dump       the database, as pg_dump writes it in its custom format
    objects.jsonl    every object that the state needs: key, size, digest
    objects/<key>    their bytes, unless it is a backup of the state alone

Mode 700: prompts and results stand in it, and the secrets of webhooks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import file_digest
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

FORMAT: Literal[1] = 1


class BackupError(Exception):
    """The backup cannot be made or cannot be restored. The message is for a person."""


class Manifest(BaseModel):
    """What the backup says of itself."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1]
    made_at: datetime  # the moment whose state it has, by Postgres's clock
    halfrate: str  # version of the program that made it
    revision: str  # of the tables
    dump_sha256: str
    with_bytes: bool  # False: of the objects, only the list
    objects: NonNegativeInt
    bytes: NonNegativeInt  # of all objects
    missing: NonNegativeInt  # objects that the state names and that the store did not have


class Entry(BaseModel):
    """One object that the state needs."""

    model_config = ConfigDict(frozen=True)

    key: str
    bytes: NonNegativeInt
    sha256: str | None = None  # None: its bytes are not here
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Archive:
    """The files of one backup."""

    folder: Path

    @property
    def dump(self) -> Path:
        """What pg_restore reads."""
        return self.folder / "state.dump"

    @property
    def listing(self) -> Path:
        """An Entry a line."""
        return self.folder / "objects.jsonl"

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def bytes_of(self, key: str) -> Path:
        """Where the bytes of that object lie.

        Raises:
            BackupError: the key leads out of the backup.
        """
        objects = (self.folder / "objects").resolve()
        path = (objects / key).resolve()
        if not path.is_relative_to(objects) or path == objects:
            raise BackupError(f"{self.listing} has a key that is no path: {key!r}")
        return path

    def write_manifest(self, manifest: Manifest) -> None:
        """The last file to be written: a backup without it is not one."""
        self._manifest.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def manifest(self) -> Manifest:
        """What it says of itself.

        Raises:
            BackupError: it is no backup, or one of a format that this program does not know.
        """
        try:
            return Manifest.model_validate_json(self._manifest.read_bytes())
        except FileNotFoundError as error:
            raise BackupError(f"{self.folder} is no backup: it has no manifest.json.") from error
        except ValidationError as error:
            named = ", ".join(str(each["loc"][0]) for each in error.errors() if each["loc"])
            raise BackupError(
                f"{self._manifest} is none that this halfrate can read (it knows format {FORMAT}): "
                f"{named or 'not JSON'}."
            ) from error

    def write_listing(self, entries: Iterable[Entry]) -> None:
        """Replace the list by these; they may come out of the one that stands there."""
        written = self.listing.with_suffix(".new")
        with written.open("w", encoding="utf-8") as file:
            for entry in entries:
                file.write(entry.model_dump_json(exclude_defaults=True) + "\n")
        written.replace(self.listing)

    def entries(self) -> Iterator[Entry]:
        """Every object that the state needs.

        Raises:
            BackupError: the list is damaged.
        """
        try:
            with self.listing.open("rb") as file:
                for line in file:
                    yield Entry.model_validate_json(line)
        except (ValidationError, FileNotFoundError) as error:
            raise BackupError(f"{self.listing} is damaged.") from error

    def check_whole(self) -> Manifest:
        """Its manifest, once every file that it promises was found, of the right size. The dump is
        read to its end, the objects are not: whoever puts them back compares their digests.

        Raises:
            BackupError: something is missing or not as it was.
        """
        manifest = self.manifest()
        if not self.dump.is_file() or sha256_of(self.dump) != manifest.dump_sha256:
            raise BackupError(f"{self.dump} is not what the backup was made with.")
        number = 0
        for entry in self.entries():
            number += 1
            path = self.bytes_of(entry.key)
            if entry.sha256 and not (path.is_file() and path.stat().st_size == entry.bytes):
                raise BackupError(f"{path} is missing or not of {entry.bytes} bytes.")
        if number != manifest.objects:
            raise BackupError(
                f"{self.listing} has {number} objects; it was made with {manifest.objects}."
            )
        return manifest


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
