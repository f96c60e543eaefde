"""How much memory does a batch need, and what is done when it or half precision runs out?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

# What torch's CPU allocator says; it has no exception class of its own.
_CPU_SHORTAGE = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True, slots=True)
class Limit:
    """Most bytes that a batch may take beside the weights, and what it takes.

    `per_token` bytes for a token, `per_pair` for a token of a batch and a token of its longest
    sequence (scores of attention, where no flash kernel keeps them small).
    """

    most: int | None = None  # None: no limit is known
    per_token: float = 0.0
    per_pair: float = 0.0

    def needs(self, tokens: int, longest: int) -> float:
        """Bytes for so many tokens, padding included, of sequences up to so long."""
        return tokens * (self.per_token + longest * self.per_pair)

    def allows(self, tokens: int, longest: int) -> bool:
        """Whether such a batch stays within the limit."""
        return self.most is None or self.needs(tokens, longest) <= self.most


def fitted(samples: Sequence[tuple[int, int, int]], most: int | None) -> Limit:
    """The limit under what was measured: tokens, the longest's tokens, bytes of each sample."""
    tokens, longest, measured = np.array(samples, dtype=np.float64).T
    terms = np.stack([tokens, tokens * longest], axis=1)
    both, *_ = np.linalg.lstsq(terms, measured, rcond=None)
    if (both < 0).any():  # noise: then the larger of what one term alone would need
        return Limit(most, per_token=float((measured / tokens).max()))
    return Limit(most, per_token=float(both[0]), per_pair=float(both[1]))


def measured_on_cuda(
    run: Callable[[int, int], None], device: torch.device, lengths: Sequence[int]
) -> list[tuple[int, int, int]]:
    """What batches of one and of four sequences of these lengths take at most: fit for `fitted`."""
    samples = []
    for length in lengths:
        for count in (1, 4):
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run(count, length)
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
            samples.append((count * length, length, peak))
    return samples


def estimated(config: Any, *, padded: bool, most: int | None) -> Limit:  # noqa: ANN401 a transformers config
    """What the shapes of a model say, for devices that do not tell what they hold.

    A CPU's allocator does not: residents of a process are everybody's. Float32 throughout: some
    eight tensors as wide as the hidden states and two as wide as the intermediate ones live at
    once; in the padded path three of scores.
    """
    width = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    heads = int(getattr(config, "num_attention_heads", 1))
    return Limit(most, 4.0 * (8 * width + 2 * inner), 4.0 * 3 * heads if padded else 0.0)


def most_held(device: torch.device) -> int | None:
    """Most bytes that the device held so far for this process; None where it cannot tell."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might have gone through."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_SHORTAGE in str(error)


def release(device: torch.device) -> None:
    """Give cached blocks back. Only of use once no reference to the failed batch is left.

    An exception being handled is such a reference: call this after its except block.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def widened(model: Any) -> Iterator[None]:  # noqa: ANN401 a torch Module
    """The model in float32 for a while, then exactly as it was: widening loses nothing."""
    tensors = [t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()]
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
