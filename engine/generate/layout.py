"""Which rows of a packed step read which keys?

A step's tokens lie end to end, one row each. Every row reads its own sequence's keys up to itself,
and whole stems above. So attention falls into parts that need no mask but one by length: *groups*
of sequences with one row each over neighbouring slots, *chunks* of several rows that look at
themselves causally, and *spans* of keys that all of a set of rows see whole. Parts are merged by
their log-sum-exp.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.plan.prefix import Stem
from engine.plan.schedule import Piece, Step
from engine.plan.sequence import Sequence as Running
from engine.plan.slots import Slot

# Slots of a group that no row of it belongs to are read in vain: at most so many for each that is.
_MOST_VAIN = 0.5


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `start` to `end`, one a slot, over `count` slots side by side from `first` on."""

    start: int
    end: int
    first: Slot
    count: int
    places: Tensor | None  # int64 [rows], which of the slots is a row's; None: all, in order
    lengths: Tensor  # int64 [count], tokens of each slot that are read
    longest: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `end` are neighbours in one text; they see themselves causally."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `begin` to `end` of a slot, which all these rows see; the first is at `position`."""

    rows: slice | Tensor
    slot: Slot
    begin: int
    end: int
    position: int


@dataclass(slots=True, eq=False)
class Layout:
    """A step as its attention reads it. `calls` counts the attention layers that have run."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    sampled: Tensor  # int64 [answers], rows whose scores are wanted
    pieces: tuple[Piece, ...]  # in the order of their rows
    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]
    spans: tuple[Span, ...]
    slots: tuple[Tensor, Tensor, Tensor]  # int64 [rows]: slot start, slot size, place in the slot
    last: int  # the greatest position
    calls: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)  # what layers have in common

    @property
    def rows(self) -> int:
        """How many tokens it holds."""
        return len(self.ids)

    def cells(self, heads: int) -> Tensor:
        """Where each row's heads are written, int64 [rows × heads]."""
        if ("cells", heads) not in self.kept:
            start, size, place = (column[:, None] for column in self.slots)
            cells = start * heads + torch.arange(heads) * size + place
            self.kept["cells", heads] = cells.flatten()
        found: Tensor = self.kept["cells", heads]
        return found


def lay_out(step: Step) -> Layout:
    """Give every token of a step its row."""
    pieces = _ordered(step.pieces)
    starts = np.cumsum([0, *(piece.count for piece in pieces)])
    counts = np.array([piece.count for piece in pieces])
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)

    def spread(values: Iterable[int]) -> Tensor:
        return torch.from_numpy(np.repeat(np.fromiter(values, np.int64), counts))

    within = torch.from_numpy(inside)
    positions = spread(piece.begin for piece in pieces) + within
    ids: list[int] = []
    for piece in pieces:
        ids += tokens_of(piece)
    rows = list(pairwise(starts.tolist()))
    single = sum(_is_single(piece) for piece in pieces)
    sampled = [
        row
        for (_, end), piece in zip(rows, pieces, strict=True)
        for row in range(end - piece.scored, end)
    ]
    return Layout(
        ids=torch.tensor(ids),
        positions=positions,
        sampled=torch.tensor(sampled, dtype=torch.int64),
        pieces=tuple(pieces),
        groups=tuple(_groups(pieces[:single])),
        chunks=tuple(Chunk(start, end) for start, end in rows[single:]),
        spans=tuple(_spans(pieces, rows, single)),
        slots=(
            spread(piece.slot.start for piece in pieces),
            spread(piece.slot.size for piece in pieces),
            spread(piece.offset + piece.before for piece in pieces) + within,
        ),
        last=int(positions.max()),
    )


def _ordered(pieces: Sequence[Piece]) -> list[Piece]:
    """Single rows of sequences first, as their slots lie; then chunks as they were planned."""
    single = [piece for piece in pieces if _is_single(piece)]
    single.sort(key=lambda piece: (piece.slot.size, piece.slot.start))
    return single + [piece for piece in pieces if not _is_single(piece)]


def _is_single(piece: Piece) -> bool:
    return piece.count == 1 and isinstance(piece.strand, Running)


def tokens_of(piece: Piece) -> Sequence[int]:
    """Ids of its rows."""
    begin, end = piece.begin, piece.begin + piece.count
    if isinstance(piece.strand, Stem):
        return piece.strand.tokens[begin:end]
    return [*piece.strand.tokens(begin, end), *piece.guesses]


def scored(pieces: Iterable[Piece]) -> list[Running]:
    """Whose each row of a step's scores is; neighbours where guesses are scored too."""
    return [
        piece.strand
        for piece in pieces
        if isinstance(piece.strand, Running)
        for _ in range(piece.scored)
    ]


def _groups(pieces: Sequence[Piece]) -> Iterator[Group]:
    """Runs of slots of one size with few gaps."""
    start = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or not _joins(pieces[start], pieces[end], end - start):
            yield _group(pieces[start:end], start)
            start = end


def _joins(first: Piece, piece: Piece, rows: int) -> bool:
    distance = piece.slot.start - first.slot.start
    size = first.slot.size
    aligned = piece.slot.size == size and distance % size == 0
    return aligned and distance // size - rows <= _MOST_VAIN * (rows + 1)


def _group(pieces: Sequence[Piece], start: int) -> Group:
    first = pieces[0].slot
    places = [(piece.slot.start - first.start) // first.size for piece in pieces]
    count = places[-1] + 1
    lengths = torch.ones(count, dtype=torch.int64)
    at = torch.tensor(places)
    lengths[at] = torch.tensor([piece.before + 1 for piece in pieces])
    return Group(
        start=start,
        end=start + len(pieces),
        first=first,
        count=count,
        places=None if count == len(pieces) else at,
        lengths=lengths,
        longest=int(lengths.max()),
    )


def _spans(pieces: Sequence[Piece], rows: Sequence[tuple[int, int]], single: int) -> Iterator[Span]:
    """What chunks computed earlier, and the stems, each once for all rows below it."""
    below: dict[Stem, list[tuple[int, int]]] = {}
    for number, (piece, (start, end)) in enumerate(zip(pieces, rows, strict=True)):
        if piece.before and number >= single:
            begin = piece.offset
            own = slice(start, end)
            yield Span(own, piece.slot, begin, begin + piece.before, piece.strand.start)
        if isinstance(piece.strand, Stem):
            stems = piece.strand.way_down()[:-1]
        else:
            stems = piece.strand.stems()
        for stem in stems:
            below.setdefault(stem, []).append((start, end))
    for stem, parts in below.items():
        if stem.slot is not None:
            end = stem.offset + stem.end - stem.start
            yield Span(_joined(parts), stem.slot, stem.offset, end, stem.start)


def _joined(parts: Sequence[tuple[int, int]]) -> slice | Tensor:
    """The rows of these parts: a slice where they are neighbours, else int64 [rows]."""
    start, end = parts[0][0], parts[-1][1]
    if sum(stop - begin for begin, stop in parts) == end - start:
        return slice(start, end)
    return torch.cat([torch.arange(begin, stop) for begin, stop in parts])
