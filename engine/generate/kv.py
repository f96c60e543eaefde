"""Where do keys and values stand?

A slot of `size` tokens holds, head after head, `size` rows; slots follow each other as the books in
engine.plan.slots number their tokens. So one slot's head is contiguous, and neighbouring slots of
one size are one tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.plan.schedule import Move
from engine.plan.slots import Slot

_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class Heads:
    """What one attention layer keeps of a token."""

    count: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's keys and values, [tokens × heads, dim]."""

    heads: Heads
    keys: Tensor
    values: Tensor

    def write(self, cells: Tensor, key: Tensor, value: Tensor) -> None:
        """Put rows [cells, dim] to their places."""
        self.keys.index_copy_(0, cells, key)
        self.values.index_copy_(0, cells, value)

    def slots(self, first: Slot, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots side by side, [count, heads, size, dim]; views."""
        begin, rows = first.start * self.heads.count, first.size * self.heads.count
        shape = (count, self.heads.count, first.size, -1)
        keys = self.keys.narrow(0, begin, count * rows).view(shape)
        return keys, self.values.narrow(0, begin, count * rows).view(shape)

    def span(self, slot: Slot, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot's tokens `begin` to `end`, [heads, tokens, dim]; views."""
        keys, values = self.slots(slot, 1)
        return keys[0, :, begin:end], values[0, :, begin:end]


class KV:
    """The KV memory of all layers: `tokens` tokens, touched by the system only where written."""

    def __init__(self, tokens: int, layers: Sequence[Heads], dtype: torch.dtype) -> None:
        self.layers = [
            LayerKV(
                heads,
                _zeros(tokens * heads.count, heads.key_dim, dtype),
                _zeros(tokens * heads.count, heads.value_dim, dtype),
            )
            for heads in layers
        ]

    def move(self, move: Move) -> None:
        """Copy what a sequence has computed into its larger slot."""
        for layer in self.layers:
            old = layer.span(move.source, 0, move.count)
            new = layer.span(move.target, 0, move.count)
            for source, target in zip(old, new, strict=True):
                target.copy_(source)

    def wipe(self, slot: Slot) -> None:
        """Forget what a slot held: under a mask, a number that is not finite still does harm."""
        for layer in self.layers:
            for tensor in layer.slots(slot, 1):
                tensor.zero_()


def _zeros(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[rows, dim] on the CPU, at a cache line's border.

    By numpy, which asks the system for zeros; torch would write them, and so take all the memory.
    """
    size = rows * dim * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _LINE, dtype=np.uint8))
    begin = -memory.data_ptr() % _LINE
    return memory[begin : begin + size].view(dtype).view(rows, dim)
