"""How are the bytes of a shard's lines read? They lie scattered over the input object."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from service.db.lines import PendingLine
from service.storage import Storage

READERS = 8
JOIN_GAP = 64 * 1024
JOIN_MOST = 4 * 1024 * 1024


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
