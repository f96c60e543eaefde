"""Which rows of a packed step read which keys?

A step's tokens lie end to end, one row each. Every row reads its own sequence's keys up to itself,
and whole stems above. Where that is little, a row *reads* it all by itself. Else attention falls
into parts that need no mask: *chunks* of several rows that look at themselves causally, and *spans*
of keys that all of a set of rows see whole. Parts are merged by their log-sum-exp.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan.prefix import Stem
from engine.plan.schedule import Piece, Step
from engine.plan.sequence import Sequence as Running
from engine.plan.slots import Slot

# Rows that read at most so many keys are quicker one by one than by torch's kernel: of their own,
# and of stems too where a piece is a single row.
_SHORT = 128

# What an exact step, and the rows it scores, are filled up to a multiple of by rows of nobody:
# products of fewer rows may round otherwise.
FULL = 16


@dataclass(frozen=True, slots=True)
class Reads:
    """The spans of keys that rows read by themselves, each row up to its own position.

    `spans`, int64 [spans, 5]: slot start and size, place in the slot, number of keys, position of
    the first; a row's are those from `firsts` [rows + 1] on. positions: int64 [rows].
    """

    spans: NDArray[np.int64]
    firsts: NDArray[np.int64]
    positions: NDArray[np.int64]


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

    ids: Tensor  # int64 [rows], rows of nobody last
    positions: Tensor  # int64 [rows]
    sampled: Tensor  # int64 [answers, or more], rows whose scores are wanted first
    pieces: tuple[Piece, ...]  # in the order of their rows
    short: int  # its first rows, which read by themselves
    reads: Reads  # of those
    chunks: tuple[Chunk, ...]
    spans: tuple[Span, ...]
    slots: tuple[Tensor, Tensor, Tensor]  # int64 [known]: slot start, slot size, place in the slot
    last: int  # the greatest position
    calls: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)  # what layers have in common

    @property
    def rows(self) -> int:
        """How many tokens it holds."""
        return len(self.ids)

    @property
    def known(self) -> int:
        """Rows that are somebody's."""
        return len(self.slots[0])

    def cells(self, heads: int) -> Tensor:
        """Where each known row's heads are written, int64 [known × heads]."""
        if ("cells", heads) not in self.kept:
            start, size, place = (column[:, None] for column in self.slots)
            cells = start * heads + torch.arange(heads) * size + place
            self.kept["cells", heads] = cells.flatten()
        found: Tensor = self.kept["cells", heads]
        return found


def lay_out(step: Step) -> Layout:
    """Give every token of a step its row."""
    short = [piece for piece in step.pieces if _is_short(piece)]
    short.sort(key=lambda piece: piece.slot.start)
    others = [piece for piece in step.pieces if not _is_short(piece)]
    return _lay_out([*short, *others], len(short), exact=False)


def lay_out_exactly(step: Step) -> Layout:
    """The same, and no neighbour, chunk or stem changes a row by a bit: all read by themselves."""
    return _lay_out(step.pieces, len(step.pieces), exact=True)


def _lay_out(pieces: Sequence[Piece], short: int, *, exact: bool) -> Layout:
    fill = FULL if exact else 1
    starts = np.cumsum([0, *(piece.count for piece in pieces)])
    counts = np.array([piece.count for piece in pieces])
    known = int(starts[-1])
    inside = np.arange(known) - np.repeat(starts[:-1], counts)

    def spread(values: Iterable[int]) -> NDArray[np.int64]:
        return np.repeat(np.fromiter(values, np.int64), counts)

    ids, positions = np.zeros((2, known + -known % fill), np.int64)
    ids[:known] = [token for piece in pieces for token in tokens_of(piece)]
    positions[:known] = spread(piece.begin for piece in pieces) + inside
    rows = list(pairwise(starts.tolist()))
    sampled = [
        row
        for (_, end), piece in zip(rows, pieces, strict=True)
        for row in range(end - piece.scored, end)
    ]
    sampled += [0] * (-len(sampled) % fill)
    slots = (
        spread(piece.slot.start for piece in pieces),
        spread(piece.slot.size for piece in pieces),
        spread(piece.offset + piece.before for piece in pieces) + inside,
    )
    alone = [exact or (n < short and _reads_stems(piece)) for n, piece in enumerate(pieces)]
    return Layout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        sampled=torch.tensor(sampled, dtype=torch.int64),
        pieces=tuple(pieces),
        short=int(starts[short]),
        reads=_reads(pieces[:short], alone[:short], positions[: starts[short]]),
        chunks=tuple(Chunk(start, end) for start, end in rows[short:]),
        spans=tuple(_spans(pieces, rows, short, alone)),
        slots=(torch.from_numpy(slots[0]), torch.from_numpy(slots[1]), torch.from_numpy(slots[2])),
        last=int(positions.max()),
    )


def _is_short(piece: Piece) -> bool:
    """Whether what its rows read of their own is little, or they are: then one by one."""
    last = piece.before + piece.count
    return isinstance(piece.strand, Running) and (piece.count == 1 or last <= _SHORT)


def _reads_stems(piece: Piece) -> bool:
    """Whether its rows read their stems by themselves too."""
    return piece.count == 1 and piece.strand.start <= _SHORT


def _reads(pieces: Sequence[Piece], alone: Sequence[bool], positions: NDArray[np.int64]) -> Reads:
    """What rows of these pieces read of themselves and, where they do that alone, of stems."""
    spans: list[tuple[int, int, int, int, int]] = []
    firsts = [0]
    for piece, stems_too in zip(pieces, alone, strict=True):
        above = [
            (stem.slot.start, stem.slot.size, stem.offset, stem.end - stem.start, stem.start)
            for stem in _stems(piece)
            if stems_too and stem.slot is not None
        ]
        slot, start = piece.slot, piece.strand.start
        for more in range(1, piece.count + 1):
            spans += above
            spans.append((slot.start, slot.size, piece.offset, piece.before + more, start))
            firsts.append(len(spans))
    return Reads(np.array(spans, np.int64).reshape(-1, 5), np.array(firsts, np.int64), positions)


def _stems(piece: Piece) -> list[Stem]:
    """The stems above a piece, from the beginning of the text."""
    strand = piece.strand
    return strand.way_down()[:-1] if isinstance(strand, Stem) else strand.stems()


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


def _spans(
    pieces: Sequence[Piece], rows: Sequence[tuple[int, int]], short: int, alone: Sequence[bool]
) -> Iterator[Span]:
    """What chunks computed earlier, and the stems, each once for all rows below it."""
    below: dict[Stem, list[tuple[int, int]]] = {}
    for number, (piece, (start, end)) in enumerate(zip(pieces, rows, strict=True)):
        if piece.before and number >= short:
            begin = piece.offset
            own = slice(start, end)
            yield Span(own, piece.slot, begin, begin + piece.before, piece.strand.start)
        for stem in () if alone[number] else _stems(piece):
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
