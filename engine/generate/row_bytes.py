"""Is a row of a product the same to the bit, however many rows stand beside it? Tried at load.

It depends on chip, library and shape, so every shape of the model is tried, with numbers of rows
as steps have them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.generate.layout import FULL
from engine.generate.rule import NotSupportedError
from engine.model.int8 import Int8Linear
from engine.model.linear import PrepackedLinear

_COUNTS = tuple(FULL * times for times in (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 64))
_MOST_OF_HEAD = 8 * FULL  # it scores few rows of a step


def check_products(model: nn.Module, vocab_size: int) -> None:
    """Raises NotSupportedError where a row's bits depend on how many others there are."""
    tried: set[tuple[type, int, int]] = set()
    for module in model.modules():
        if not isinstance(module, nn.Linear | PrepackedLinear | Int8Linear | Conv1D):
            continue
        width, made = _shape(module)
        if (type(module), width, made) in tried:
            continue
        tried.add((type(module), width, made))
        most = _MOST_OF_HEAD if made == vocab_size else max(_COUNTS)
        if not _is_steady(module, width, [count for count in _COUNTS if count <= most]):
            msg = f"products of {width} by {made} whose rows are not the same in any number"
            raise NotSupportedError(msg)


def _is_steady(module: nn.Module, width: int, counts: list[int]) -> bool:
    """The widest product first: its first rows against those of all narrower ones."""
    dtype = next((each.dtype for each in module.parameters()), torch.float32)
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(counts[-1], width, generator=generator).to(dtype)
    whole: Tensor = module(rows)
    return all(
        torch.equal(module(rows[-count:]), whole[-count:])
        and torch.equal(module(rows[:count]), whole[:count])
        for count in counts
    )


def _shape(module: Any) -> tuple[int, int]:  # noqa: ANN401 as above; Conv1D has names of its own
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return module.in_features, module.out_features
