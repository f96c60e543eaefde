"""How does a pack attend on a CUDA device? One flash kernel over all sequences, no padding.

Written against torch 2.13's `torch.nn.attention.varlen`; it has not been run on a GPU yet.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.transfer import upload

# One split of the keys: their sum is then in one order, whatever else is in the pack. torch 2.11
# has no such argument, and never splits the keys of a pack.
_ONE_SPLIT = {"num_splits": 1} if "num_splits" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where the sequences of a pack begin and end, as the kernel reads it."""

    offsets: Tensor  # int32 [sequences + 1], on the device; repeated ones are empty sequences
    longest: int  # tokens, at least those of the longest sequence

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Bounds":
        """Of sequences that lie one behind another; made once a pack, without a sync."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(upload(offsets, device), max(lengths))


def suits(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> bool:
    """Whether the kernel computes this at all; else there is one SDPA call a run of like length.

    It is compiled for half precision on compute capability 8.0 and later, heads of up to 256
    numbers in steps of 8, and plain softmax.
    """
    return (
        device.type == "cuda"
        and dtype in {torch.bfloat16, torch.float16}
        and head_dim <= 256
        and head_dim % 8 == 0
        and softcap is None
        and sinks is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Each sequence of the pack on its own.

    query: [tokens, heads, dim]; key, value: [tokens, key heads, dim], heads a multiple of key
    heads; all with the last axis contiguous. A key at a distance of `window` or more is not seen.
    Returns [tokens, heads, dim]; the rows of tokens beyond the last bound are not defined.
    """
    # An argument is passed only where it says something: releases differ in what they take.
    options: dict[str, Any] = dict(_ONE_SPLIT)
    if causal or window is not None:
        left = -1 if window is None else window - 1
        options["window_size"] = (left, 0 if causal else left)
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    offsets, longest = bounds.offsets, bounds.longest
    attended = varlen_attn(
        query, key, value, offsets, offsets, longest, longest, scale=scale, **options
    )
    return cast("Tensor", attended)  # a pair only where return_aux asks for one
