"""Where do the lines of a JSONL object start and end? Split on `\\n` bytes alone, streaming."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """One physical line that is not blank."""

    number: int
    """1-based; blank lines are skipped but counted."""
    offset: int
    """Of its first byte in the object; a byte order mark at the start is not part of line 1."""
    length: int
    """In bytes, without the line end."""
    raw: bytes | None
    """None where the line is longer than the limit: its bytes were not kept."""


def split(chunks: Iterable[bytes], *, limit: int) -> Iterator[RawLine]:
    """The lines of an object that arrives in chunks of any size; holds at most limit + chunk."""
    number, start = 0, 0
    # A `\r` and the byte order mark do not count against the limit.
    most = limit + len(BOM) + 1
    kept: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for piece in ends:
            number += 1
            length = size + len(piece)
            whole = None if length > most else b"".join((*kept, piece))
            yield from _line(number, start, length, whole, limit)
            start += length + 1
            kept, size = [], 0
        size += len(rest)
        if size > most:
            kept = []
        elif rest:
            kept.append(rest)
    if size:
        whole = None if size > most else b"".join(kept)
        yield from _line(number + 1, start, size, whole, limit)


def _line(
    number: int, offset: int, length: int, whole: bytes | None, limit: int
) -> Iterator[RawLine]:
    if whole is None:
        yield RawLine(number, offset, length, None)
        return
    if number == 1 and whole.startswith(BOM):
        whole, offset = whole[len(BOM) :], offset + len(BOM)
    if whole.endswith(b"\r"):
        whole = whole[:-1]
    if not whole or whole.isspace():
        return
    yield RawLine(number, offset, len(whole), whole if len(whole) <= limit else None)
