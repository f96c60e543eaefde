"""Are lines found where they stand, however the bytes arrive?"""

import itertools
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.jsonl import BOM, RawLine, split

LIMIT = 1_000

# Mostly what matters to a splitter, and now and then anything at all.
pieces = st.one_of(
    st.sampled_from([b"\n", b"\r\n", b"\r", b" ", b"\t", b"a", b"{}", BOM, "\u2028é".encode()]),
    st.binary(max_size=4),
)
documents = st.lists(pieces, max_size=40).map(b"".join)


def reference(data: bytes, limit: int) -> list[RawLine]:
    """The slow, obvious way: all bytes at once."""
    found, offset = [], 0
    for number, physical in enumerate(data.split(b"\n"), start=1):
        start, line = offset, physical
        offset += len(physical) + 1
        if number == 1 and line.startswith(BOM):
            line, start = line[len(BOM) :], start + len(BOM)
        line = line.removesuffix(b"\r")
        if line.strip():
            found.append(RawLine(number, start, len(line), line if len(line) <= limit else None))
    return found


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(documents, st.lists(st.integers(min_value=0), max_size=12))
def test_lines_equal_those_of_the_whole_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    assert list(split(chunked(data, cuts), limit=LIMIT)) == reference(data, LIMIT)


def test_a_cut_at_every_byte_changes_nothing() -> None:
    data = BOM + b'{"a": 1}\r\n\n  \n{"b": "\xe2\x80\xa8"}\r\n\r\n{"c": 3}'
    whole = reference(data, LIMIT)
    assert [line.number for line in whole] == [1, 4, 6]
    for cut in range(len(data) + 1):
        assert list(split([data[:cut], data[cut:]], limit=LIMIT)) == whole
    assert list(split([data[n : n + 1] for n in range(len(data))], limit=LIMIT)) == whole


@given(documents)
def test_a_line_is_where_its_offset_says(data: bytes) -> None:
    for line in split([data], limit=LIMIT):
        assert data[line.offset : line.offset + line.length] == line.raw


@pytest.mark.parametrize("over", [0, 1, 2, 50])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\nx\n"])
@pytest.mark.parametrize("start", [b"", BOM])
def test_a_line_over_the_limit_is_told_with_its_size(over: int, end: bytes, start: bytes) -> None:
    line = b"x" * (20 + over)
    for size in (1, 3, 1_000):
        data = start + line + end
        found = next(split([data[n : n + size] for n in range(0, len(data), size)], limit=20))
        assert found.number == 1
        assert (found.raw is None) == (over > 0)
        # Bytes that were not kept cannot be looked at for a byte order mark or a `\r`.
        assert len(line) <= found.length <= len(line) + (len(BOM) + 1 if over else 0)


def test_a_line_over_the_limit_leaves_its_neighbours() -> None:
    data = b"a\n" + b"x" * 5_000 + b"\nb\n"
    for size in (1, 7, 100, 10_000):
        chunks = [data[n : n + size] for n in range(0, len(data), size)]
        found = list(split(chunks, limit=100))
        assert [(line.number, line.raw) for line in found] == [(1, b"a"), (2, None), (3, b"b")]
        assert [line.offset for line in found] == [0, 2, 5_003]


def test_a_line_over_the_limit_is_not_kept_in_memory() -> None:
    size, chunks = 65_536, 500

    def arriving() -> Iterator[bytes]:
        for _ in range(chunks):
            yield b"x" * size

    tracemalloc.start()
    try:
        found = list(split(arriving(), limit=200_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(line.length, line.raw) for line in found] == [(size * chunks, None)]
    assert peak < 1_000_000


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n\r\n", b" \t\n\n  ", BOM, BOM + b"\n"])
def test_blank_lines_alone_are_no_lines(data: bytes) -> None:
    assert list(split([data], limit=LIMIT)) == []
