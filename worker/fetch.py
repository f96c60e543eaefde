"""How are the bytes of a shard's lines read? They lie scattered over the input object."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from service.db.lines import PendingLine
from service.storage import Storage

READERS = 8
JOIN_GAP = 64 * 1024
JOIN_MOST = 4 * 1024 * 1024

PIECE = 256
"""Lines that come together: the engine begins on them while the next are being tokenised."""

READ_BYTES = 32 * 1024 * 1024
"""What is read before it is taken: as a rule the whole shard, so that near lines are one read."""


def pieces(
    storage: Storage, key: str, rows: Sequence[PendingLine]
) -> Iterator[list[tuple[PendingLine, bytes]]]:
    """The lines and their bytes in the order of `rows`, a few at a time."""
    for several in _by_bytes(rows):
        by_offset = sorted(several, key=lambda row: row.byte_offset)
        found = {row.line: raw for row, raw in fetch(storage, key, by_offset)}
        for start in range(0, len(several), PIECE):
            yield [(row, found.pop(row.line)) for row in several[start : start + PIECE]]


def _by_bytes(rows: Sequence[PendingLine]) -> Iterator[list[PendingLine]]:
    several: list[PendingLine] = []
    size = 0
    for row in rows:
        if several and size + row.byte_length > READ_BYTES:
            yield several
            several, size = [], 0
        several.append(row)
        size += row.byte_length
    if several:
        yield several


def fetch(
    storage: Storage, key: str, rows: Sequence[PendingLine]
) -> Iterator[tuple[PendingLine, bytes]]:
    """The bytes of each line. `rows` come by offset; near ones are read together, and no more than
    READERS reads are ahead of what is taken: lines that are refused are many bytes of no cost."""

    def read(group: list[PendingLine]) -> list[tuple[PendingLine, bytes]]:
        start = group[0].byte_offset
        end = group[-1].byte_offset + group[-1].byte_length
        data = storage.read(key, start, end - start)
        return [
            (row, data[row.byte_offset - start : row.byte_offset - start + row.byte_length])
            for row in group
        ]

    with ThreadPoolExecutor(READERS, thread_name_prefix="fetch") as readers:
        ahead: deque[Future[list[tuple[PendingLine, bytes]]]] = deque()
        for group in _near(rows):
            ahead.append(readers.submit(read, group))
            if len(ahead) == READERS:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _near(rows: Sequence[PendingLine]) -> Iterator[list[PendingLine]]:
    group: list[PendingLine] = []
    for row in rows:
        if group:
            end = group[-1].byte_offset + group[-1].byte_length
            whole = row.byte_offset + row.byte_length - group[0].byte_offset
            if row.byte_offset - end > JOIN_GAP or whole > JOIN_MOST:
                yield group
                group = []
        group.append(row)
    if group:
        yield group
