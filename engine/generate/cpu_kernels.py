"""What does a step on a CPU do that torch has no one pass for? Compiled by numba.

Attention of rows that each read keys of their own is thousands of products too small for a library:
torch's kernel for CPUs takes two to three times as long. A row's result depends on that row alone.
All in float32.

Kernels run on torch's own threads, by the OpenMP that torch brings and has loaded for all: a second
pool, as numba's own is, would stand in the way of the first.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from engine.generate.kv import LayerKV
from engine.generate.layout import Reads
from engine.generate.rule import Rule

# Sums may be taken in any order, which is what vectors need; what is not a number stays so, and a
# division by zero makes such.
_OPTIONS: Any = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
_LOWEST = -1e30  # below every score

if sys.pycache_prefix is not None:  # machine code goes where bytecode goes
    numba.config.CACHE_DIR = sys.pycache_prefix

_openmp = ctypes.CDLL(None)
_has_openmp = all(hasattr(_openmp, name) for name in ("GOMP_parallel", "omp_get_thread_num"))


def read_rows(
    queries: Tensor, layer: LayerKV, reads: Reads, rule: Rule, into: tuple[Tensor, Tensor]
) -> None:
    """Let every row attend to what it reads.

    queries: [rows, kv heads, queries a kv head, dim]; into, for these rows and maybe more: as
    queries, and without dim: the mean of values and the log of its weight.
    """
    if not len(queries):
        return
    queries = queries.contiguous()
    numbers = np.array([rule.scale, rule.softcap or 0], np.float32)
    _run(
        _read_rows,
        [*queries.shape, layer.heads.value_dim, rule.window or 0],
        [
            queries, layer.keys, layer.values, reads.spans, reads.firsts, reads.positions,
            numbers, *into,
        ],
    )  # fmt: skip


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows: float32 [..., dim]; weight: [dim]. → as rows."""
    flat = rows.reshape(-1, rows.shape[-1])
    made = torch.empty_like(flat)
    _run(_rms_norm, flat.shape, [flat, weight, np.array([eps], np.float32), made])
    return made.view(rows.shape)


def _run(kernel: Callable[[Any], None], sizes: Any, arrays: list[Any]) -> None:  # noqa: ANN401 numbers
    """Call it on each thread with these sizes, and where these arrays stand."""
    places = [each.data_ptr() if isinstance(each, Tensor) else each.ctypes.data for each in arrays]
    words = np.array([*sizes, *places], np.int64)
    compiled = _compiled(kernel)
    if _has_openmp:
        where = (ctypes.c_void_p(place) for place in (compiled.address, words.ctypes.data))
        _openmp.GOMP_parallel(*where, torch.get_num_threads(), 0)
    else:
        compiled.ctypes(words.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))


@cache
def _compiled(kernel: Callable[[Any], None]) -> Any:  # noqa: ANN401 numba's
    signature = types.void(types.CPointer(types.int64))
    try:
        return numba.cfunc(signature, cache=True, **_OPTIONS)(kernel)
    except RuntimeError:  # there is nowhere to keep it
        return numba.cfunc(signature, **_OPTIONS)(kernel)


if _has_openmp:
    _mine = types.ExternalFunction("omp_get_thread_num", types.int32())
    _team = types.ExternalFunction("omp_get_num_threads", types.int32())

    @numba.njit  # type: ignore[untyped-decorator]
    def _turns(count: int) -> range:
        """This thread's."""
        return range(_mine(), count, _team())
else:

    @numba.njit  # type: ignore[untyped-decorator]
    def _turns(count: int) -> range:
        """All of them."""
        return range(count)


def _pointer_to(kind: Any) -> Any:  # noqa: ANN401 numba's types
    """What takes a number as the address of numbers of this kind."""

    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(_: Any, address: Any) -> Any:  # noqa: ANN401 numba's types
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:  # noqa: ANN401
            return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), generate

    return pointer


_floats, _integers = _pointer_to(types.float32), _pointer_to(types.int64)


def _read_rows(words: Any) -> None:  # noqa: ANN401 a pointer to what `_run` lists
    word = carray(words, 15)
    rows, heads, each, dim, wide, window = word[0], word[1], word[2], word[3], word[4], word[5]
    queries = carray(_floats(word[6]), (rows, heads, each, dim))
    firsts, positions = carray(_integers(word[10]), rows + 1), carray(_integers(word[11]), rows)
    spans = carray(_integers(word[9]), (firsts[rows], 5))
    scale, softcap = _floats(word[12])[0], _floats(word[12])[1]
    read = carray(_floats(word[13]), (rows, heads, each, wide))
    weights = carray(_floats(word[14]), (rows, heads, each))
    for turn in _turns(rows * heads):
        row, head = turn // heads, turn % heads
        least = positions[row] - window + 1 if window > 0 else 0  # the first position it sees
        count = 0
        for n in range(firsts[row], firsts[row + 1]):
            count += max(0, spans[n, 3] - max(0, least - spans[n, 4]))
        scores = np.empty((each, count), np.float32)
        end = 0
        for n in range(firsts[row], firsts[row + 1]):
            hidden = max(0, least - spans[n, 4])
            begin, end = end, end + max(0, spans[n, 3] - hidden)
            cell = spans[n, 0] * heads + head * spans[n, 1] + spans[n, 2] + hidden
            key = carray(_floats(word[7] + 4 * cell * dim), (end - begin, dim))
            for place in range(begin, end):
                for query in range(each):
                    score = np.float32(0)
                    for d in range(dim):
                        score += queries[row, head, query, d] * key[place - begin, d]
                    scores[query, place] = score * scale
        for query in range(each):
            if softcap > 0:
                for place in range(count):
                    scores[query, place] = softcap * np.tanh(scores[query, place] / softcap)
            weights[row, head, query] = _softmax(scores[query])
        total = np.zeros((each, wide), np.float32)
        end = 0
        for n in range(firsts[row], firsts[row + 1]):
            hidden = max(0, least - spans[n, 4])
            begin, end = end, end + max(0, spans[n, 3] - hidden)
            cell = spans[n, 0] * heads + head * spans[n, 1] + spans[n, 2] + hidden
            value = carray(_floats(word[8] + 4 * cell * wide), (end - begin, wide))
            for place in range(begin, end):
                for query in range(each):
                    share = scores[query, place]
                    for d in range(wide):
                        total[query, d] += share * value[place - begin, d]
        read[row, head] = total


@numba.njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _softmax(scores: NDArray[np.float32]) -> Any:  # noqa: ANN401 a float32
    """Turn scores into shares of 1; the log of the sum of their exponentials.

    exp by Cephes' polynomial (S. Moshier), because numba calls the system's number by number: 2^n
    times e^r, n a whole number and r at most ln 2 / 2.
    """
    top = np.float32(_LOWEST)
    for n in range(len(scores)):
        top = max(top, scores[n])
    powers = np.empty(len(scores), np.int32)
    for n in range(len(scores)):
        x = max(scores[n] - top, np.float32(-87))  # below it float32 has next to nothing
        power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        scores[n] = p * r * r + r + np.float32(1)
        powers[n] = (np.int32(power) + np.int32(127)) << np.int32(23)  # the bits of 2^n
    by = powers.view(np.float32)
    total = np.float32(0)
    for n in range(len(scores)):
        scores[n] *= by[n]
        total += scores[n]
    for n in range(len(scores)):
        scores[n] /= total
    return top + np.log(total)


def _rms_norm(words: Any) -> None:  # noqa: ANN401 as above
    word = carray(words, 6)
    count, dim = word[0], word[1]
    rows, made = carray(_floats(word[2]), (count, dim)), carray(_floats(word[5]), (count, dim))
    weight, eps = carray(_floats(word[3]), dim), _floats(word[4])[0]
    for row in _turns(count):
        squares = np.float32(0)
        for n in range(dim):
            squares += rows[row, n] * rows[row, n]
        by = np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)
        for n in range(dim):
            made[row, n] = rows[row, n] * by * weight[n]
