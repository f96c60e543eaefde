"""How fast does this machine multiply a model's own linear layers, and how much work is a text?"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel

from engine.model.linear import PrepackedLinear

_SECONDS = 0.5  # of one measurement, at least


@dataclass(frozen=True)
class Layers:
    """The linear layers of a model's blocks, as torch computes them and over prepacked weights."""

    plain: list[nn.Linear]
    prepacked: list[PrepackedLinear]
    width: int
    depth: int

    @classmethod
    def of(cls, folder: Path) -> "Layers":
        """Those of the encoder in a model folder."""
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        blocks = [block for block in model.modules() if isinstance(block, nn.ModuleList)]
        plain = [m for b in blocks for m in b.modules() if type(m) is nn.Linear]
        config = model.config
        prepacked = [PrepackedLinear(layer) for layer in plain]
        return cls(plain, prepacked, config.hidden_size, config.num_hidden_layers)

    @property
    def flops_a_token(self) -> int:
        """Of the linear layers, in float operations."""
        return sum(2 * layer.in_features * layer.out_features for layer in self.plain)

    def useful_flops(self, lengths: Sequence[int]) -> int:
        """Of linear layers and attention over texts of these token counts, without padding."""
        attention = sum(4 * n * n * self.width * self.depth for n in lengths)
        return sum(lengths) * self.flops_a_token + attention

    def rate(self, layers: Sequence[Callable[[Tensor], Tensor]], rows: int) -> float:
        """Float operations a second of one layer after the other, at this many rows."""
        inputs = [torch.randn(rows, layer.in_features) for layer in self.plain]
        with torch.inference_mode():
            return _repeat(layers, inputs) * rows * self.flops_a_token


def _repeat(layers: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor]) -> float:
    """Passes over all layers a second."""
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
    begun, passes = time.perf_counter(), 0
    while time.perf_counter() - begun < _SECONDS:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
        passes += 1
    return passes / (time.perf_counter() - begun)
