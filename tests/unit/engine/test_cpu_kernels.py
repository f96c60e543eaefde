"""Do compiled kernels compute what the same thing written out in torch does?"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.generate import cpu_kernels
from engine.generate.cpu_kernels import read_rows, rms_norm
from engine.generate.kv import Heads, LayerKV
from engine.generate.layout import Reads
from engine.generate.rule import Rule

HEADS, EACH, DIM, WIDE = 3, 2, 40, 24
TOKENS = 400
# Of each row: the slots it reads (start, size, place in it, keys), one after the other.
SOME = [
    [(0, 8, 0, 1)],
    [(16, 16, 0, 16)],
    [(0, 8, 1, 5), (48, 48, 20, 17)],
    [(0, 8, 0, 8), (16, 16, 4, 2), (96, 192, 0, 129)],
    [(96, 192, 0, 190)],
]


def one_by_one(queries: Tensor, layer: LayerKV, reads: Reads, rule: Rule) -> tuple[Tensor, Tensor]:
    """The same, a head at a time, in float64."""
    read = torch.empty(*queries.shape[:3], WIDE, dtype=torch.float64)
    weights = torch.empty(queries.shape[:3], dtype=torch.float64)
    for row, head in np.ndindex(len(queries), HEADS):
        cells: list[int] = []
        for start, size, place, count, first in reads.spans[reads.firsts[row] :][
            : reads.firsts[row + 1] - reads.firsts[row]
        ].tolist():
            cells += [
                start * HEADS + head * size + place + n
                for n in range(count)
                if rule.window is None or reads.positions[row] - (first + n) < rule.window
            ]
        scores = queries[row, head].double() @ layer.keys[cells].double().T * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        read[row, head] = torch.softmax(scores, dim=-1) @ layer.values[cells].double()
        weights[row, head] = torch.logsumexp(scores, dim=-1)
    return read, weights


def made(chosen: Sequence[int] = range(len(SOME))) -> tuple[Tensor, LayerKV, Reads]:
    draw = torch.Generator().manual_seed(3)
    queries = torch.randn(HEADS, len(SOME), EACH, DIM, generator=draw).transpose(0, 1)
    keys, values = (torch.randn(TOKENS * HEADS, dim, generator=draw) for dim in (DIM, WIDE))
    spans: list[tuple[int, ...]] = []
    firsts, positions = [0], []
    for row in chosen:
        position = 0
        for span in SOME[row]:
            spans.append((*span, position))
            position += span[-1]
        firsts.append(len(spans))
        positions.append(position - 1)
    reads = Reads(np.array(spans), np.array(firsts), np.array(positions))
    return queries[list(chosen)], LayerKV(Heads(HEADS, DIM, WIDE), keys, values), reads


def computed(queries: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    read = torch.full((*queries.shape[:3], WIDE), math.nan)
    weights = torch.full(queries.shape[:3], math.nan)
    read_rows(queries, *given, (read, weights))
    return read, weights


@pytest.mark.parametrize("rule", [Rule(0.16), Rule(4), Rule(0.2, softcap=2), Rule(0.2, window=9)])
def test_rows_read_their_own_keys(rule: Rule) -> None:
    given = (*made(), rule)
    read, weights = computed(*given)
    expected, expected_weights = one_by_one(*given)
    assert torch.allclose(read.double(), expected, atol=3e-6)
    assert torch.allclose(weights.double(), expected_weights, atol=2e-5)


def test_scores_far_apart_weigh_nothing_or_all() -> None:
    queries, layer, reads = made()
    given = (queries * 1000, layer, reads, Rule(1))
    read, weights = computed(*given)
    expected, expected_weights = one_by_one(*given)
    assert torch.allclose(read.double(), expected, atol=1e-5)
    assert torch.allclose(weights.double(), expected_weights, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_and_stays_in_its_row(bad: float) -> None:
    queries, layer, reads = made()
    sound, _ = computed(queries, layer, reads, Rule(0.2))
    queries = queries.clone()
    queries[2, 1, 0, 5] = bad
    read, _ = computed(queries, layer, reads, Rule(0.2))
    assert not read[2, 1, 0].isfinite().any()
    read[2, 1, 0] = sound[2, 1, 0]
    assert torch.equal(read, sound)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_to_the_bit_in_any_company(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = computed(*made(), Rule(0.2))
        for row in range(len(SOME)):
            alone = computed(*made([row]), Rule(0.2))
            for found, known in zip(alone, together, strict=True):
                assert torch.equal(found[0], known[row])
    finally:
        torch.set_num_threads(before)


def test_where_keys_are_kept_does_not_change_a_bit() -> None:
    """One span of 190, or the same keys behind each other in many."""
    queries, layer, _ = made()
    whole = Reads(np.array([(96, 192, 0, 190, 0)]), np.array([0, 1]), np.array([189]))
    parts = [(96, 192, begin, min(7, 190 - begin), begin) for begin in range(0, 190, 7)]
    cut = Reads(np.array(parts), np.array([0, len(parts)]), np.array([189]))
    for rule in (Rule(0.2), Rule(0.2, window=50)):
        for found, known in zip(
            computed(queries[:1], layer, cut, rule),
            computed(queries[:1], layer, whole, rule),
            strict=True,
        ):
            assert torch.equal(found, known)


@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 37, 576), (5, 3, 16)])
def test_norm(shape: tuple[int, ...]) -> None:
    rows, weight = torch.randn(shape), torch.randn(shape[-1])
    for given in (rows, rows.transpose(0, 1)):
        expected = functional.rms_norm(given.double(), weight.shape, weight.double(), 1e-5)
        assert torch.allclose(rms_norm(given, weight, 1e-5).double(), expected, atol=1e-5)


def test_without_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a kernel that is alone in its team finds it: the number 0 of 1.
    given = (*made(), Rule(0.2))
    expected = computed(*given)
    monkeypatch.setattr(cpu_kernels, "_has_openmp", False)
    for found, before in zip(computed(*given), expected, strict=True):
        assert torch.equal(found, before)
