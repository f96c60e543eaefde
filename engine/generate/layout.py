"""Which rows of a packed step read which keys?

A step's tokens lie end to end, one row each. Every row reads its own sequence's keys up to itself,
and whole stems above. So attention falls into parts that need no mask: *short* pieces, each row of
which reads its own slot up to itself, longer *chunks* that look at themselves causally, and *spans*
of keys that all of a set of rows see whole. Parts are merged by their log-sum-exp.
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

# Rows that read at most so many keys of their own are quicker one by one than by torch's kernel.
_SHORT = 128


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
    short: int  # its first rows, which are those of short pieces
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

    def of_short(self, heads: int, window: int | None) -> tuple[Any, Any, Any]:
        """What rows of short pieces read of their slots, as `read_rows` is told it."""
        if ("short", heads, window) not in self.kept:
            start, size, place = (column[: self.short].numpy() for column in self.slots)
            cells = start[:, None] * heads + np.arange(heads) * size[:, None]
            begin = np.zeros_like(place) if window is None else np.maximum(place + 1 - window, 0)
            self.kept["short", heads, window] = (cells, begin, place + 1)
        found: tuple[Any, Any, Any] = self.kept["short", heads, window]
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
    short = sum(_is_short(piece) for piece in pieces)
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
        short=int(starts[short]),
        chunks=tuple(Chunk(start, end) for start, end in rows[short:]),
        spans=tuple(_spans(pieces, rows, short)),
        slots=(
            spread(piece.slot.start for piece in pieces),
            spread(piece.slot.size for piece in pieces),
            spread(piece.offset + piece.before for piece in pieces) + within,
        ),
        last=int(positions.max()),
    )


def _ordered(pieces: Sequence[Piece]) -> list[Piece]:
    """Short ones first, as their slots lie; then the others as they were planned."""
    short = [piece for piece in pieces if _is_short(piece)]
    short.sort(key=lambda piece: piece.slot.start)
    return short + [piece for piece in pieces if not _is_short(piece)]


def _is_short(piece: Piece) -> bool:
    """Whether its rows are read one by one: they are few, or what they read is."""
    last = piece.before + piece.count
    return isinstance(piece.strand, Running) and (piece.count == 1 or last <= _SHORT)


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


def _spans(pieces: Sequence[Piece], rows: Sequence[tuple[int, int]], short: int) -> Iterator[Span]:
    """What chunks computed earlier, and the stems, each once for all rows below it."""
    below: dict[Stem, list[tuple[int, int]]] = {}
    for number, (piece, (start, end)) in enumerate(zip(pieces, rows, strict=True)):
        if piece.before and number >= short:
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
