"""Where in the store lie the parts and the results of a batch? Every key names its attempt."""

import re
from dataclasses import dataclass
from uuid import UUID

PARTS, RESULTS = "parts/", "results/"

_PART = re.compile(r"parts/([0-9a-f]{32})/([0-9a-f]{32})-(\d{1,9})-\d+")
_RESULT = re.compile(r"results/([0-9a-f]{32})/[a-z]+-(\d{1,9})")


def parts_prefix(batch_hex: str) -> str:
    """Under this, and nowhere else, lie the parts of a batch."""
    return f"{PARTS}{batch_hex}/"


def part_key(batch: UUID, shard: UUID, attempt: int, sequence: int) -> str:
    """Of the object that one attempt at a shard flushes."""
    return f"{parts_prefix(batch.hex)}{shard.hex}-{attempt}-{sequence}"


def results_prefix(batch_hex: str) -> str:
    """Under this, and nowhere else, lie the files that attempts at the batch's results wrote."""
    return f"{RESULTS}{batch_hex}/"


def result_key(batch: UUID, name: str, attempt: int) -> str:
    """Of the output or error file that one attempt at assembling writes."""
    return f"{results_prefix(batch.hex)}{name}-{attempt}"


@dataclass(frozen=True, slots=True)
class Place:
    """What a key says: whose bytes these are. `shard` is None of a result."""

    key: str
    batch: UUID
    shard: UUID | None
    attempt: int


def read_key(key: str) -> Place | None:
    """What the key of a part or result says; None where it is neither."""
    if part := _PART.fullmatch(key):
        return Place(key, UUID(hex=part[1]), UUID(hex=part[2]), int(part[3]))
    if result := _RESULT.fullmatch(key):
        return Place(key, UUID(hex=result[1]), None, int(result[2]))
    return None
