"""Which spans of the KV memory does each piece of a step read, as the kernels want to be told?

One array of whole numbers says all of a step, so that one transfer brings it to the device. Where
a captured graph reads it, it is as large for every step that the graph replays: what is left over
are rows of nobody, which are written nowhere and read nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.generate.layout import tokens_of
from engine.plan.prefix import Stem
from engine.plan.schedule import Piece, Step
from engine.plan.slots import Slot

READER = 5  # numbers: first row, rows, position of the first row, first span, end of its spans
SPAN = 5  # numbers: slot's start, slot's size, place in it, positions of its first token and end
CELL = 3  # numbers: slot's start, slot's size, place in it (-1: nowhere)

_Span = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """How many of each a step's array holds."""

    rows: int
    sampled: int
    readers: int
    spans: int

    def holds(self, other: "Room") -> bool:
        """Whether a step of another size can stand in it."""
        return (
            self.rows >= other.rows
            and self.sampled >= other.sampled
            and self.readers >= other.readers
            and self.spans >= other.spans
        )

    @property
    def bounds(self) -> list[int]:
        """Where ids, positions, cells, sampled rows, readers and spans end in the array."""
        sizes = (
            self.rows, self.rows, self.rows * CELL, self.sampled, self.readers * READER,
            self.spans * SPAN,
        )  # fmt: skip
        return list(accumulate(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """A step on the device; all int64."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    cells: Tensor  # [rows, 3], where a row's keys and values are written
    sampled: Tensor  # [sampled], rows whose scores are wanted
    readers: Tensor  # [readers, READER], those of a single row first
    spans: Tensor  # [spans, SPAN], of each reader in the order of positions
    single: int  # readers of a single row
    longest: int  # rows of the longest reader

    @classmethod
    def of(cls, numbers: Tensor, room: Room, *, single: int, longest: int) -> "Readers":
        """Views of the array that `Planned.numbers` filled, wherever it lies by now."""
        ids, positions, cells, sampled, readers, spans = numbers.tensor_split(room.bounds)[:6]
        return cls(
            ids, positions, cells.view(-1, CELL), sampled, readers.view(-1, READER),
            spans.view(-1, SPAN), single, longest,
        )  # fmt: skip

    @property
    def chunks(self) -> int:
        """Readers of several rows."""
        return len(self.readers) - self.single


def nobody(room: Room) -> NDArray[np.int64]:
    """The array of a step of rows that are nobody's, one a reader."""
    found = np.zeros(room.bounds[-1], dtype=np.int64)
    _, _, cells, _, readers, _ = np.split(found, room.bounds)[:6]
    cells.reshape(-1, CELL)[:, 2] = -1
    table = readers.reshape(-1, READER)
    table[:, 0] = np.arange(len(table))
    table[:, 1] = 1
    return found


class Planned:
    """A step's pieces in the order of their rows: single ones first."""

    def __init__(self, step: Step) -> None:
        self.pieces = sorted(step.pieces, key=lambda piece: piece.count > 1)
        self.single = sum(piece.count == 1 for piece in self.pieces)
        self.longest = max(piece.count for piece in self.pieces)
        self._above: dict[Stem | None, tuple[_Span, ...]] = {None: ()}

    @cached_property
    def spans(self) -> list[tuple[_Span, ...]]:
        """Of each piece."""
        return [(*self._stems_above(piece), _own_span(piece)) for piece in self.pieces]

    @property
    def room(self) -> Room:
        """What it takes."""
        return Room(
            rows=sum(piece.count for piece in self.pieces),
            sampled=sum(piece.scored for piece in self.pieces),
            readers=len(self.pieces),
            spans=sum(map(len, self.spans)),
        )

    def numbers(self, room: Room) -> NDArray[np.int64]:
        """The step in an array of this room, which holds it; a larger one only of single rows."""
        found = nobody(room)
        ids, positions, cells, sampled, readers, spans = np.split(found, room.bounds)[:6]
        counts = np.fromiter((piece.count for piece in self.pieces), np.int64)
        ends = np.cumsum(counts)
        rows, pieces = int(ends[-1]), len(self.pieces)
        within = np.arange(rows) - np.repeat(ends - counts, counts)
        begins = np.fromiter((piece.begin for piece in self.pieces), np.int64)
        ids[:rows] = np.fromiter(chain.from_iterable(map(tokens_of, self.pieces)), np.int64)
        positions[:rows] = np.repeat(begins, counts) + within
        table = cells.reshape(-1, CELL)
        table[:rows] = np.repeat([_first_cell(piece) for piece in self.pieces], counts, axis=0)
        table[:rows, 2] += within
        wanted = [
            row
            for end, piece in zip(ends, self.pieces, strict=True)
            for row in range(end - piece.scored, end)
        ]
        sampled[: len(wanted)] = wanted
        table = readers.reshape(-1, READER)
        end_spans = np.cumsum([len(own) for own in self.spans])
        table[:pieces, 0] = ends - counts
        table[:pieces, 1] = counts
        table[:pieces, 2] = begins
        table[1:pieces, 3] = end_spans[:-1]
        table[:pieces, 4] = end_spans
        flat = list(chain.from_iterable(self.spans))
        spans.reshape(-1, SPAN)[: len(flat)] = flat
        return found

    def _stems_above(self, piece: Piece) -> tuple[_Span, ...]:
        strand = piece.strand
        return self._way(strand.parent if isinstance(strand, Stem) else strand.stem)

    def _way(self, stem: Stem | None) -> tuple[_Span, ...]:
        """Spans of a stem and of those above it; most pieces of a step have theirs in common."""
        if stem not in self._above:
            spans = tuple(_stem_spans(stem.way_down() if stem is not None else ()))
            self._above[stem] = spans
        return self._above[stem]


def _stem_spans(stems: Iterable[Stem]) -> Iterator[_Span]:
    for stem in stems:
        if stem.slot is not None:
            yield _span(stem.slot, stem.offset, stem.start, stem.end)


def _own_span(piece: Piece) -> _Span:
    start = piece.strand.start
    return _span(piece.slot, piece.offset, start, start + piece.before + piece.count)


def _span(slot: Slot, place: int, begin: int, end: int) -> _Span:
    return slot.start, slot.size, place, begin, end


def _first_cell(piece: Piece) -> tuple[int, int, int]:
    return piece.slot.start, piece.slot.size, piece.offset + piece.before
