"""Do compiled kernels compute what the same thing written out in torch does?"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.generate import cpu_kernels
from engine.generate.cpu_kernels import read_rows, rms_norm

HEADS, EACH, DIM, WIDE, CELLS = 3, 2, 40, 24, 700
SOME = [
    (0, 1),
    (0, 16),
    (3, 17),
    (5, 6),
    (0, 129),
    (0, 200),
]  # first key and the one after the last


def one_by_one(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Any, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same, a head at a time."""
    cells, begins, ends = rows
    read = torch.empty(*queries.shape[:3], values.shape[1], dtype=torch.float64)
    weights = torch.empty(queries.shape[:3], dtype=torch.float64)
    for row, head in np.ndindex(cells.shape):
        seen = slice(cells[row, head] + begins[row], cells[row, head] + ends[row])
        scores = queries[row, head].double() @ keys[seen].double().T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        read[row, head] = torch.softmax(scores, dim=-1) @ values[seen].double()
        weights[row, head] = torch.logsumexp(scores, dim=-1)
    return read, weights


def made(count: int = len(SOME)) -> tuple[Tensor, Tensor, Tensor, Any]:
    draw = torch.Generator().manual_seed(3)
    queries = torch.randn(HEADS, count, EACH, DIM, generator=draw).transpose(0, 1)  # as models do
    keys, values = (torch.randn(CELLS, dim, generator=draw) for dim in (DIM, WIDE))
    cells = torch.randint(0, CELLS - 200, (count, HEADS), generator=draw).numpy()
    spans = np.array([SOME[n % len(SOME)] for n in range(count)]).reshape(count, 2)
    return queries, keys, values, (cells, spans[:, 0].copy(), spans[:, 1].copy())


def computed(*given: Any) -> tuple[Tensor, Tensor]:
    queries, values = given[0], given[2]
    read = torch.full((*queries.shape[:3], values.shape[1]), math.nan)
    weights = torch.full(queries.shape[:3], math.nan)
    read_rows(*given, (read, weights))
    return read, weights


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [0.16, 4.0])
def test_rows_read_their_own_keys(scale: float, softcap: float | None) -> None:
    given = (*made(), scale, softcap)
    read, weights = computed(*given)
    expected, expected_weights = one_by_one(*given)
    assert torch.allclose(read.double(), expected, atol=2e-6)
    assert torch.allclose(weights.double(), expected_weights, atol=2e-5)


def test_scores_far_apart_weigh_nothing_or_all() -> None:
    queries, keys, values, rows = made()
    given = (queries * 1000, keys, values, rows, 1.0, None)
    read, weights = computed(*given)
    expected, expected_weights = one_by_one(*given)
    assert torch.allclose(read.double(), expected, atol=1e-5)
    assert torch.allclose(weights.double(), expected_weights, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_and_stays_in_its_row(bad: float) -> None:
    queries, keys, values, rows = made()
    sound, _ = computed(queries, keys, values, rows, 0.2, None)
    queries = queries.clone()
    queries[2, 1, 0, 5] = bad
    read, _ = computed(queries, keys, values, rows, 0.2, None)
    assert not read[2, 1, 0].isfinite().any()
    read[2, 1, 0] = sound[2, 1, 0]
    assert torch.equal(read, sound)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_to_the_bit_in_any_company(threads: int) -> None:
    queries, keys, values, (cells, begins, ends) = made(60)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together, weights = computed(queries, keys, values, (cells, begins, ends), 0.2, None)
        for row in range(6):
            own = slice(row, row + 1)
            alone, weight = computed(
                queries[own], keys, values, (cells[own], begins[own], ends[own]), 0.2, None
            )
            assert torch.equal(alone, together[own])
            assert torch.equal(weight, weights[own])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 37, 576), (5, 3, 16)])
def test_norm(shape: tuple[int, ...]) -> None:
    rows, weight = torch.randn(shape), torch.randn(shape[-1])
    for given in (rows, rows.transpose(0, 1)):
        expected = functional.rms_norm(given.double(), weight.shape, weight.double(), 1e-5)
        assert torch.allclose(rms_norm(given, weight, 1e-5).double(), expected, atol=1e-5)


def test_without_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a kernel that is alone in its team finds it: the number 0 of 1.
    given = (*made(), 0.2, None)
    expected = computed(*given)
    monkeypatch.setattr(cpu_kernels, "_has_openmp", False)
    for found, before in zip(computed(*given), expected, strict=True):
        assert torch.equal(found, before)
