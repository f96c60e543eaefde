"""How does a packed step attend so that no neighbour, chunk or prefix changes a bit of a row?

A product adds its terms up in another order where it has other rows or keys beside it. So here the
shape of every call follows from positions in the text alone: rows stand in fours, each at its place
in its four, over all keys up to the end of its page; what is not there yet is hidden. Keys of stems
and of the sequence itself are brought together first, so that where they are kept does not matter.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.generate.attention import (
    NotSupportedError,
    Rule,
    flash,
    flash_does,
    rule_of,
    written_out,
)
from engine.generate.kv import LayerKV
from engine.generate.layout import tokens_of
from engine.plan.prefix import Stem
from engine.plan.schedule import Piece, Step
from engine.plan.slots import Slot

PAGES = "halfrate_pages"  # our name among transformers' attention functions

# Steps are filled up to a multiple of this by rows of nobody, as packs of encoders are: products of
# fewer rows may round otherwise.
ROWS = 16

_PAGE = 64  # keys; the last page of a text is read whole
_FOUR = 4  # rows; with fewer, torch's kernel rounds by what else is in the call


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Texts that read keys up to the same position, by as many fours of rows each."""

    rows: Tensor  # int64 [known], rows of the step
    places: Tensor  # int64 [known], where they stand among texts × fours × 4
    fours: int
    keys: tuple[Tensor, Tensor, Tensor]  # int64 [texts, keys]: slot start, size, place in the slot
    positions: Tensor  # int64 [texts, fours × 4]

    @property
    def texts(self) -> int:
        """How many."""
        return len(self.positions)


@dataclass(slots=True, eq=False)
class PageLayout:
    """A step as its attention reads it. `calls` counts the attention layers that have run."""

    ids: Tensor  # int64 [rows], rows of nobody last
    positions: Tensor  # int64 [rows]
    sampled: Tensor  # int64 [answers, or more], rows whose scores are wanted first
    pieces: tuple[Piece, ...]  # in the order of their rows
    units: tuple[Unit, ...]
    slots: tuple[Tensor, Tensor, Tensor]  # int64 [known]: slot start, slot size, place in the slot
    calls: int = 0
    kept: dict[Any, Any] = field(default_factory=dict)  # what layers have in common

    @property
    def known(self) -> int:
        """Rows that are somebody's."""
        return len(self.slots[0])

    def cells(self, table: tuple[Tensor, Tensor, Tensor], heads: int) -> Tensor:
        """Where the heads of a table's tokens stand, int64 [its first dim, heads, its others]."""
        key = ("cells", id(table), heads)
        if key not in self.kept:
            start, size, place = (column.unsqueeze(1) for column in table)
            head = torch.arange(heads).view(-1, *[1] * (start.dim() - 2))
            self.kept[key] = start * heads + head * size + place
        found: Tensor = self.kept[key]
        return found


def lay_out(step: Step) -> PageLayout:
    """Give every token of a step its row, and every row its four."""
    known = step.tokens
    positions = np.zeros(known + -known % ROWS, dtype=np.int64)
    ids = positions.copy()
    slots = np.zeros((3, known), dtype=np.int64)
    parts: dict[tuple[int, int], list[_Part]] = {}
    sampled: list[int] = []
    row = 0
    for piece in step.pieces:
        end = row + piece.count
        ids[row:end] = tokens_of(piece)
        positions[row:end] = np.arange(piece.begin, piece.begin + piece.count)
        slots[:2, row:end] = [[piece.slot.start], [piece.slot.size]]
        slots[2, row:end] = np.arange(piece.count) + piece.offset + piece.before
        for part in _parts(piece, row):
            parts.setdefault((part.keys, part.fours), []).append(part)
        sampled += range(end - piece.scored, end)
        row = end
    # The head is a product too.
    sampled += [0] * (-len(sampled) % ROWS)
    return PageLayout(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        sampled=torch.tensor(sampled, dtype=torch.int64),
        pieces=tuple(step.pieces),
        units=tuple(_unit(alike) for alike in parts.values()),
        slots=_columns(slots),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What a piece has in one page: tokens `begin` to `end` of the text, from `row` on."""

    piece: Piece
    row: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        return (self.begin // _PAGE + 1) * _PAGE

    @property
    def first(self) -> int:
        """Position of the first row of its first four."""
        return self.begin // _FOUR * _FOUR

    @property
    def fours(self) -> int:
        return (self.end - 1) // _FOUR - self.begin // _FOUR + 1


def _parts(piece: Piece, row: int) -> Iterator[_Part]:
    begin, last = piece.begin, piece.begin + piece.count
    while begin < last:
        end = min(last, (begin // _PAGE + 1) * _PAGE)
        yield _Part(piece, row, begin, end)
        row += end - begin
        begin = end


def _unit(parts: Sequence[_Part]) -> Unit:
    """Parts with equal `keys` and `fours`."""
    fours = parts[0].fours
    width = fours * _FOUR
    keys = np.empty((3, len(parts), parts[0].keys), dtype=np.int64)
    rows, places = [], []
    for number, part in enumerate(parts):
        count = part.end - part.begin
        rows.append(np.arange(part.row, part.row + count))
        places.append(np.arange(count) + number * width + part.begin - part.first)
        _tell_keys(part, keys[:, number])
    firsts = np.array([part.first for part in parts])
    return Unit(
        rows=torch.from_numpy(np.concatenate(rows)),
        places=torch.from_numpy(np.concatenate(places)),
        fours=fours,
        keys=_columns(keys),
        positions=torch.from_numpy(firsts[:, None] + np.arange(width)),
    )


def _tell_keys(part: _Part, table: NDArray[np.int64]) -> None:
    """Write where the keys up to the end of the page stand; table: [3, keys]."""
    end = 0
    for slot, offset, start, stop in _spans(part.piece):
        end = min(stop, part.keys)
        if start < end:
            table[:2, start:end] = [[slot.start], [slot.size]]
            table[2, start:end] = np.arange(offset, offset + end - start)
    # Behind the last known token there is nothing to see; its cells must hold numbers all the same.
    table[:, end:] = table[:, :1]


def _spans(piece: Piece) -> Iterator[tuple[Slot, int, int, int]]:
    """Where all keys of a piece's text stand: slot, place in it, positions of first and end."""
    strand = piece.strand
    stems = strand.way_down()[:-1] if isinstance(strand, Stem) else strand.stems()
    for stem in stems:
        if stem.slot is not None:
            yield stem.slot, stem.offset, stem.start, stem.end
    yield piece.slot, piece.offset, strand.start, piece.begin + piece.count


def _columns(table: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    start, size, place = torch.from_numpy(table)
    return start, size, place


def register() -> None:
    """Make `PAGES` known to transformers; once or often."""
    AttentionInterface.register(PAGES, attend)


def attend(
    module: Any,  # noqa: ANN401 the attention layer that calls
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401 as the model hands them on
) -> tuple[Tensor, None]:
    """query: [1, heads, rows, dim]; key, value: [1, kv heads, rows, dim]. → [1, rows, heads, dim].

    Raises NotSupportedError where the model asks for what is not done here.
    """
    rule = rule_of(module, query, attention_mask, scaling, options)
    if rule.sinks is not None:
        msg = "attention with sinks, whose last step is not the same to the bit in any company"
        raise NotSupportedError(msg)
    layout: PageLayout = module.halfrate_carrier.layout
    layer: LayerKV = module.halfrate_carrier.kv.layers[layout.calls]
    layout.calls += 1
    heads, rows = layer.heads.count, query.shape[2]
    layer.write(
        layout.cells(layout.slots, heads).flatten(),
        *(each[0, :, : layout.known].transpose(0, 1).flatten(0, 1) for each in (key, value)),
    )
    queries = query[0].transpose(0, 1).reshape(rows, heads, -1, query.shape[-1])
    read = queries.new_zeros(*queries.shape[:3], value.shape[-1])
    for unit in layout.units:
        read[unit.rows] = _read(queries, layer, layout, unit, rule)
    return read.view(1, rows, query.shape[1], -1), None


def _read(queries: Tensor, layer: LayerKV, layout: PageLayout, unit: Unit, rule: Rule) -> Tensor:
    """What the unit's rows read, [known, kv heads, queries a kv head, dim]."""
    heads, each, dim = queries.shape[1:]
    asking = queries.new_zeros(unit.texts * unit.fours * _FOUR, heads, each, dim)
    asking[unit.places] = queries[unit.rows]
    asking = asking.view(unit.texts, unit.fours, _FOUR, heads, each, dim).transpose(2, 3)
    asking = asking.reshape(unit.texts, unit.fours, heads, _FOUR * each, dim)
    cells = layout.cells(unit.keys, heads)
    # Of torch's ways to gather rows the quickest by far.
    keys, values = (functional.embedding(cells, kept) for kept in (layer.keys, layer.values))
    mask = _mask(layout, unit, each, rule.window)
    if unit.fours == 1:
        read = _attend(asking[:, 0], keys, values, mask[:, 0], rule)[:, None]
    else:
        read = torch.stack(
            [
                _attend(
                    asking[text],
                    keys[text].expand(unit.fours, -1, -1, -1),
                    values[text].expand(unit.fours, -1, -1, -1),
                    mask[text],
                    rule,
                )
                for text in range(unit.texts)
            ]
        )
    read = read.view(unit.texts, unit.fours, heads, _FOUR, each, -1).transpose(2, 3)
    return read.reshape(-1, heads, each, values.shape[-1])[unit.places]


def _attend(asking: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: Rule) -> Tensor:
    """asking: [n, kv heads, rows, dim]; keys, values: [n, kv heads, keys, dim]; mask: [n, 1, rows,
    keys]. → as asking, with the values' dim."""
    if flash_does(rule, keys, values):
        return flash(asking, keys, values, rule, mask=mask.to(asking.dtype))[0]
    flat = [each.flatten(0, 1) for each in (asking, keys, values)]
    mask = mask.expand(-1, asking.shape[1], -1, -1).flatten(0, 1)
    read, _ = written_out(flat[0], flat[1], flat[2], mask, rule)
    return read.view(*asking.shape[:3], -1)


def _mask(layout: PageLayout, unit: Unit, each: int, window: int | None) -> Tensor:
    """[texts, fours, 1, 4 × each, keys]: 0 where a row sees the key, else -inf."""
    key = ("mask", id(unit), each, window)
    if key not in layout.kept:
        keys = unit.keys[0].shape[1]
        distance = unit.positions[:, :, None] - torch.arange(keys)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        mask = mask.repeat_interleave(each, dim=1)
        layout.kept[key] = mask.view(unit.texts, unit.fours, 1, _FOUR * each, keys)
    found: Tensor = layout.kept[key]
    return found
