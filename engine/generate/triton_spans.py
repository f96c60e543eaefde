"""How do rows read their spans of the KV memory on a CUDA device? Two kernels, and one that writes.

A reader is some neighbouring rows of one text, and the spans of memory that hold its keys, from
the text's beginning up to its last row. Rows see keys by position alone, so one rule serves next
tokens, pieces of prompts and shared beginnings. A KV head's queries are computed together.

A reader of one row cuts its keys into splits, which several programs may share. Where it cuts
depends on the row's own position, not on how many programs there are: neighbours change no bit.

Written for triton 3.7; in its interpreter (TRITON_INTERPRET=1) it runs on a CPU, as tests do. It
has not been run on a GPU yet. Importing this imports triton.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.generate.kv import Heads, LayerKV
from engine.generate.readers import CELL, READER, SPAN, Readers
from engine.generate.rule import Rule

_LOG2E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-1e30)  # below every score, yet finite

INTERPRETED = triton.knobs.runtime.interpret  # whether it all happens on the host

SPLIT = 512  # keys of a split at least
MOST_SPLITS = 16  # of a row
_PROGRAMS = 512  # wanted at once: a few for each of a large device's processors
_CELL, _READER, _SPAN = tl.constexpr(CELL), tl.constexpr(READER), tl.constexpr(SPAN)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes at once: `rows` of `each` queries, over `keys` keys.

    `group` queries share a KV head. A reader of a single row is one row; `each` is a power of two.
    """

    single: bool
    group: int
    rows: int
    each: int
    keys: int
    warps: int
    stages: int

    @property
    def parts(self) -> int:
        """Programs that share a group."""
        return -(-self.group // self.each)

    @property
    def tall(self) -> int:
        """Queries, some of them nobody's where there are fewer than a product needs."""
        return max(16, self.rows * self.each)


def tile_of(group: int, heads: Heads, dtype: torch.dtype, *, single: bool) -> Tile:
    """By shapes alone. It fits into the 99 KiB of shared memory that every device since 8.0 has."""
    size = max(heads.key_dim, heads.value_dim) * dtype.itemsize
    most, keys, stages = (64, 64, 3) if size <= 256 else (32, 32, 2) if size <= 512 else (32, 16, 2)
    each = min(triton.next_power_of_2(group), most)
    rows = 1 if single else most // each
    return Tile(single, group, rows, each, keys, warps=4 if single else 8, stages=stages)


def programs_of(readers: int, heads: int) -> int:
    """Programs that share the splits of a row: more where there are few rows."""
    wanted = triton.next_power_of_2(max(1, _PROGRAMS // max(1, readers * heads)))
    return min(MOST_SPLITS, int(wanted))


def write(layer: LayerKV, readers: Readers, key: Tensor, value: Tensor) -> None:
    """Put new keys and values, [kv heads, rows, dim], to their places; rows of nobody nowhere."""
    heads, rows, dim = key.shape
    both = max(dim, value.shape[-1])
    _write[(rows, heads)](
        key, value, layer.keys, layer.values, readers.cells, *key.stride(), *value.stride(),
        HEADS=heads, KEY=dim, VALUE=value.shape[-1], WIDTH=triton.next_power_of_2(both),
    )  # fmt: skip


def attend(query: Tensor, layer: LayerKV, readers: Readers, rule: Rule) -> Tensor:
    """query: [heads, rows, dim]. → [rows, heads, value dim], every row over its reader's spans."""
    heads, rows, _ = query.shape
    kept = layer.heads
    group = heads // kept.count
    out = query.new_empty(rows, heads, kept.value_dim)
    sinks = out if rule.sinks is None else rule.sinks
    window = 0 if rule.window is None else rule.window
    tables = (query, layer.keys, layer.values, out, sinks, readers.readers, readers.spans)
    numbers = (*query.stride(), window, rule.scale, rule.softcap or 0.0)
    if readers.single:
        tile = tile_of(group, kept, query.dtype, single=True)
        programs = programs_of(readers.single, kept.count)
        sums = torch.empty(
            (readers.single, MOST_SPLITS, heads, kept.value_dim + 2),
            dtype=torch.float32,
            device=query.device,
        )
        _attend[(readers.single, kept.count * tile.parts, programs)](
            *tables, sums, 0, *numbers, **constants(kept, rule, query.dtype, tile),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _merge[(readers.single, heads)](
            out, sums, sinks, readers.readers, window, heads,
            VALUE=kept.value_dim, VALUES=triton.next_power_of_2(kept.value_dim),
            SINKS=rule.sinks is not None, WINDOW=rule.window is not None, BLOCK=tile.keys,
            SPLIT=SPLIT, MOST=MOST_SPLITS,
        )  # fmt: skip
    if readers.chunks:
        tile = tile_of(group, kept, query.dtype, single=False)
        _attend[(readers.chunks, kept.count * tile.parts, -(-readers.longest // tile.rows))](
            *tables, out, readers.single, *numbers, **constants(kept, rule, query.dtype, tile),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def constants(heads: Heads, rule: Rule, dtype: torch.dtype, tile: Tile) -> dict[str, int]:
    """What `_attend` is compiled for."""
    return {
        "HEADS": heads.count,
        "GROUP": tile.group,
        "KEY": heads.key_dim,
        "KEYS_WIDE": max(16, triton.next_power_of_2(heads.key_dim)),
        "VALUE": heads.value_dim,
        "VALUES": max(16, triton.next_power_of_2(heads.value_dim)),
        "SINKS": rule.sinks is not None,
        "WINDOW": rule.window is not None,
        "SOFTCAP": rule.softcap is not None,
        "SINGLE": tile.single,
        "ROWS": tile.rows,
        "EACH": tile.each,
        "TALL": tile.tall,
        "BLOCK": tile.keys,
        "PARTS": tile.parts,
        "SPLIT": SPLIT,
        "MOST": MOST_SPLITS,
        # triton 3.7's interpreter multiplies bfloat16 as if its bits were whole numbers.
        "WIDEN": dtype == torch.bfloat16 and INTERPRETED,
    }


@triton.jit
def _write(
    key, value, keys, values, cells,
    key_head, key_row, key_dim, value_head, value_row, value_dim,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = tl.load(cells + row * _CELL + 2)
    if place >= 0:
        start = tl.load(cells + row * _CELL)
        size = tl.load(cells + row * _CELL + 1)
        cell = start * HEADS + head * size + place
        at = tl.arange(0, WIDTH)
        new = tl.load(key + head * key_head + row * key_row + at * key_dim, mask=at < KEY)
        tl.store(keys + cell * KEY + at, new, mask=at < KEY)
        new = tl.load(value + head * value_head + row * value_row + at * value_dim, mask=at < VALUE)
        tl.store(values + cell * VALUE + at, new, mask=at < VALUE)


@triton.jit
def _splits(low, total, BLOCK: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """How many splits the keys from `low` to `total` have, and how long each is."""
    length = total - low
    even = (length + MOST - 1) // MOST
    size = tl.maximum(SPLIT, (even + BLOCK - 1) // BLOCK * BLOCK)
    return (length + size - 1) // size, size


@triton.jit
def _attend(
    query, keys, values, out, sinks, readers, spans, sums,
    before, query_head, query_row, query_dim, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEYS_WIDE: tl.constexpr, VALUES: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, SINGLE: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    head = (tl.program_id(1) // PARTS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    reader = readers + (before + number).to(tl.int64) * _READER
    begin_row = tl.load(reader)
    count = tl.load(reader + 1).to(tl.int32)
    position = tl.load(reader + 2).to(tl.int32)
    begin_span = tl.load(reader + 3).to(tl.int32)
    end_span = tl.load(reader + 4).to(tl.int32)
    first = 0
    if not SINGLE:
        first = tl.program_id(2) * ROWS
    if first < count:
        tall = tl.arange(0, TALL)
        row = first + tall // EACH
        of_group = part * EACH + tall % EACH
        asks = (row < count) & (of_group < GROUP)
        asking = head * GROUP + of_group
        positions = position + row
        wide = tl.arange(0, KEYS_WIDE)
        value_at = tl.arange(0, VALUES)
        place = asking * query_head + (begin_row + row) * query_row
        asked = tl.load(
            query + place[:, None] + (wide * query_dim)[None, :],
            mask=asks[:, None] & (wide < KEY)[None, :],
            other=0.0,
        )
        if WIDEN:
            asked = asked.to(tl.float32)
        low = 0
        if WINDOW:
            low = tl.maximum(0, position + first + 1 - window)
        total = position + tl.minimum(first + ROWS, count)
        pieces, size = 1, total - low
        turn, turns = 0, 1
        if SINGLE:
            pieces, size = _splits(low, total, BLOCK, SPLIT, MOST)
            turn, turns = tl.program_id(2), tl.num_programs(2)
        for piece in range(turn, pieces, turns):
            begin = low + piece * size
            end = tl.minimum(begin + size, total)
            top = tl.full([TALL], _LOWEST, tl.float32)
            weight = tl.full([TALL], 0.0, tl.float32)
            read = tl.full([TALL, VALUES], 0.0, tl.float32)
            for span in range(begin_span, end_span):
                table = spans + span * _SPAN
                start = tl.load(table) * HEADS + head * tl.load(table + 1) + tl.load(table + 2)
                from_position = tl.load(table + 3).to(tl.int32)
                to_position = tl.load(table + 4).to(tl.int32)
                stop = tl.minimum(end, to_position)
                for block in range(tl.maximum(begin, from_position), stop, BLOCK):
                    at = block + tl.arange(0, BLOCK)
                    inside = at < stop
                    cell = start + (at - from_position)
                    key = tl.load(
                        keys + (cell * KEY)[None, :] + wide[:, None],
                        mask=inside[None, :] & (wide < KEY)[:, None],
                        other=0.0,
                    )
                    if WIDEN:
                        key = key.to(tl.float32)
                    scores = tl.dot(asked, key, input_precision="ieee") * scale
                    if SOFTCAP:  # softcap × tanh(scores / softcap)
                        scores = softcap - 2 * softcap / (1 + tl.exp(2 * scores / softcap))
                    seen = inside[None, :] & (at[None, :] <= positions[:, None])
                    if WINDOW:
                        seen = seen & (positions[:, None] - at[None, :] < window)
                    scores = tl.where(seen, scores * _LOG2E, float("-inf"))
                    new_top = tl.maximum(top, tl.max(scores, axis=1))
                    kept = tl.exp2(top - new_top)
                    shares = tl.exp2(scores - new_top[:, None])
                    value = tl.load(
                        values + (cell * VALUE)[:, None] + value_at[None, :],
                        mask=inside[:, None] & (value_at < VALUE)[None, :],
                        other=0.0,
                    )
                    weight = weight * kept + tl.sum(shares, axis=1)
                    read = read * kept[:, None]
                    shares = shares.to(value.dtype)
                    if WIDEN:
                        shares, value = shares.to(tl.float32), value.to(tl.float32)
                    read += tl.dot(shares, value, input_precision="ieee")
                    top = new_top
            stores = asks[:, None] & (value_at < VALUE)[None, :]
            if pieces == 1:
                if SINKS:
                    sink = tl.load(sinks + asking, mask=asks, other=0.0).to(tl.float32) * _LOG2E
                    last_top = tl.maximum(top, sink)
                    left = tl.exp2(top - last_top)
                    read = read * left[:, None]
                    weight = weight * left + tl.exp2(sink - last_top)
                # A row of nobody has read nothing: zeros.
                found = read / tl.maximum(weight, 1e-30)[:, None]
                to = ((begin_row + row) * (HEADS * GROUP) + asking) * VALUE
                to = out + to[:, None] + value_at[None, :]
                tl.store(to, found.to(out.dtype.element_ty), mask=stores)
            elif SINGLE:
                entry = (number * MOST + piece).to(tl.int64) * (HEADS * GROUP) + asking
                entry = sums + entry * (VALUE + 2)
                tl.store(entry[:, None] + value_at[None, :], read, mask=stores)
                tl.store(entry + VALUE, top, mask=asks)
                tl.store(entry + VALUE + 1, weight, mask=asks)


@triton.jit
def _merge(
    out, sums, sinks, readers, window, heads,
    VALUE: tl.constexpr, VALUES: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Put a row's splits together, in their order, where it has several."""
    number = tl.program_id(0).to(tl.int64)
    asking = tl.program_id(1)
    reader = readers + number * _READER
    position = tl.load(reader + 2).to(tl.int32)
    low = 0
    if WINDOW:
        low = tl.maximum(0, position + 1 - window)
    pieces, _ = _splits(low, position + 1, BLOCK, SPLIT, MOST)
    if pieces > 1:
        at = tl.arange(0, VALUES)
        top = tl.full([1], _LOWEST, tl.float32)
        weight = tl.full([1], 0.0, tl.float32)
        if SINKS:
            top = top * 0 + tl.load(sinks + asking).to(tl.float32) * _LOG2E
            weight = weight + 1
        read = tl.full([VALUES], 0.0, tl.float32)
        for piece in range(pieces):
            place = ((number * MOST + piece) * heads + asking) * (VALUE + 2)
            piece_top = tl.load(sums + place + VALUE)
            new_top = tl.maximum(top, piece_top)
            kept, share = tl.exp2(top - new_top), tl.exp2(piece_top - new_top)
            read = read * kept + tl.load(sums + place + at, mask=at < VALUE, other=0.0) * share
            weight = weight * kept + tl.load(sums + place + VALUE + 1) * share
            top = new_top
        place = (tl.load(reader) * heads + asking) * VALUE
        found = read / weight
        tl.store(out + place + at, found.to(out.dtype.element_ty), mask=at < VALUE)
