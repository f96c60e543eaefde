"""What is done when the device runs out of memory, and when half precision runs out of range?"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

# What torch's CPU allocator says; it has no exception class of its own.
_CPU_SHORTAGE = "DefaultCPUAllocator: can't allocate memory"


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
