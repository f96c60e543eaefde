"""Texts over a KV memory in spans: what the kernels make of them, and what is right.

Imports nothing but torch, numpy and the engine: a lent machine may hold no more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.generate import triton_spans
from engine.generate.kv import Heads, LayerKV
from engine.generate.readers import Readers, Room, nobody
from engine.generate.rule import Rule

BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Text:
    """`before` tokens are in the memory in spans cut at `cuts`; `count` more are new."""

    before: int
    count: int
    cuts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.before + self.count


@dataclass(slots=True)
class Case:
    """Texts with keys and values of random numbers, and a memory that holds them."""

    texts: list[Text]
    heads: Heads
    group: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    seed: int = 0
    device: str = "cpu"
    queries: list[Tensor] = field(default_factory=list)  # of each text, [heads, count, dim]
    keys: list[Tensor] = field(default_factory=list)  # [kv heads, length, dim]
    values: list[Tensor] = field(default_factory=list)
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(self.device, self.dtype)

        kept = self.heads
        for text in self.texts:
            self.queries.append(random(kept.count * self.group, text.count, kept.key_dim))
            self.keys.append(random(kept.count, text.length, kept.key_dim))
            self.values.append(random(kept.count, text.length, kept.value_dim))
        if self.with_sinks:
            self.sinks = random(kept.count * self.group)

    @property
    def rule(self) -> Rule:
        return Rule(0.3, self.window, self.softcap, self.sinks)

    def attended(self, spare: int = 0) -> list[Tensor]:
        """What the kernels make of it, [count, heads, value dim] of each text."""
        order = sorted(range(len(self.texts)), key=lambda n: self.texts[n].count > 1)
        texts = [self.texts[n] for n in order]
        slots = list(self._slots(texts))
        total = sum(size for spans in slots for _, size, _, _, _ in spans)
        layer = LayerKV(
            self.heads,
            # What nobody wrote may be anything: reading it must show.
            self._unwritten(total * self.heads.count, self.heads.key_dim),
            self._unwritten(total * self.heads.count, self.heads.value_dim),
        )
        room = Room(
            rows=sum(text.count for text in texts) + spare,
            sampled=0,
            readers=len(texts) + spare,
            spans=sum(map(len, slots)),
        )
        numbers = nobody(room)
        _, _, cells, _, readers, spans = np.split(numbers, room.bounds)[:6]
        spans[:] = np.concatenate([np.ravel(own) for own in slots])
        row = span = 0
        for place, (n, text, own) in enumerate(zip(order, texts, slots, strict=True)):
            for start, size, offset, begin, end in own:
                written = min(end, text.before)
                for old, memory in ((self.keys, layer.keys), (self.values, layer.values)):
                    view = memory[start * self.heads.count :][: size * self.heads.count]
                    view = view.view(self.heads.count, size, -1)
                    view[:, offset : offset + written - begin] = old[n][:, begin:written]
            start, size, offset, begin, _ = own[-1]
            for count in range(text.count):
                at = offset + text.before + count - begin
                cells.reshape(-1, 3)[row + count] = (start, size, at)
            table = (row, text.count, text.before, span, span + len(own))
            readers.reshape(-1, 5)[place] = table
            row, span = row + text.count, span + len(own)
        single = sum(text.count == 1 for text in texts)
        assert not spare or single == len(texts)
        found = Readers.of(
            torch.from_numpy(numbers).to(self.device),
            room,
            single=single + spare,
            longest=max(text.count for text in texts),
        )
        new = [(self.keys[n][:, text.before :], self.values[n][:, text.before :])
               for n, text in zip(order, texts, strict=True)]  # fmt: skip
        heads = self.heads.count * self.group
        empty = torch.zeros(1, spare, 1, dtype=self.dtype, device=self.device)
        query = [self.queries[n] for n in order] + [empty.expand(heads, -1, self.heads.key_dim)]
        key, value = ([pair[which] for pair in new] for which in (0, 1))
        key.append(empty.expand(self.heads.count, -1, self.heads.key_dim))
        value.append(empty.expand(self.heads.count, -1, self.heads.value_dim))
        triton_spans.write(layer, found, torch.cat(key, dim=1), torch.cat(value, dim=1))
        # As models hand them on: heads side by side in a row.
        asked = torch.cat(query, dim=1).transpose(0, 1).contiguous().transpose(0, 1)
        out = triton_spans.attend(asked, layer, found, self.rule)
        assert not out[row:].any()
        parts = dict(zip(order, out.split([text.count for text in texts] + [spare]), strict=False))
        return [parts[n] for n in range(len(texts))]

    def _unwritten(self, cells: int, dim: int) -> Tensor:
        return torch.full((cells, dim), math.nan, dtype=self.dtype, device=self.device)

    def _slots(self, texts: list[Text]) -> Iterator[list[tuple[int, int, int, int, int]]]:
        """A slot for each stretch, somewhere inside it."""
        start = 0
        for text in texts:
            borders = [0, *text.cuts, text.length]
            spans = []
            for number, (begin, end) in enumerate(pairwise(borders)):
                offset = 3 * number
                size = end - begin + offset + 2
                spans.append((start, size, offset, begin, end))
                start += size
            yield spans

    def expected(self) -> list[Tensor]:
        return [self._slowly(n) for n in range(len(self.texts))]

    def _slowly(self, n: int) -> Tensor:
        """[count, heads, value dim], float32."""
        text = self.texts[n]
        query, key, value = (x[n].float() for x in (self.queries, self.keys, self.values))
        key, value = (x.repeat_interleave(self.group, dim=0) for x in (key, value))
        places = torch.arange(text.length, device=self.device)
        distance = places[text.before :, None] - places
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.softcap is None and self.sinks is None:
            read = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3)
            return read.transpose(0, 1)
        scores = query @ key.transpose(1, 2) * 0.3
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.float()[:, None, None].expand(-1, text.count, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        shares = scores.softmax(dim=-1)[..., : text.length]
        return (shares @ value).transpose(0, 1)


def check(case: Case) -> None:
    """The kernels do as SDPA does, to the dtype's precision."""
    bound = BOUNDS[case.dtype]
    for found, expected in zip(case.attended(), case.expected(), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound)
