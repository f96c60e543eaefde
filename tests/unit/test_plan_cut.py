"""Is a batch cut into shards that hold every line once, within the budget, neighbours together?"""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Sampling
from engine.stub import StubTokenizer
from service.bodies import check
from service.bodies.check import Rules
from service.catalog import ModelKind
from worker import plan
from worker.plan import TWIN_COST, Costs, cut
from worker.prompts import Generate
from worker.readings import Embed, Reading, ZeroShot

Line = tuple[int, int, int]  # model, key, tokens

RULES = Rules(max_inputs=9)

lines_of = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=2),
        st.integers(min_value=0, max_value=3) | st.integers(min_value=0, max_value=2**64 - 1),
        st.integers(min_value=0, max_value=30),
    ),
    max_size=60,
)
budgets_of = st.lists(st.floats(min_value=0.5, max_value=80), min_size=3, max_size=3)
encoders_of = st.frozensets(st.integers(min_value=0, max_value=2))


def costs(lines: list[Line]) -> Costs:
    """Every second physical line holds a request, as if blank lines stood between."""
    return Costs(
        line=np.array([1 + 2 * n for n in range(len(lines))], dtype=np.int32),
        model=np.array([model for model, _, _ in lines], dtype=np.int32),
        key=np.array([key for _, key, _ in lines], dtype=np.uint64),
        tokens=np.array([tokens for _, _, tokens in lines], dtype=np.int32),
    )


def alike(lines: list[Line]) -> list[Line]:
    """Lines of one key as they are planned: twins, of one length."""
    return [(model, key, key % 30) for model, key, _ in lines]


def reference(
    lines: list[Line], budgets: list[float], encoders: frozenset[int] = frozenset()
) -> list[tuple[int, list[int], int]]:
    """The slow, obvious way: sort tuples, start a new shard whenever the next does not fit, or
    when all of its twins do not but would in a shard of their own."""
    numbered = sorted((*line, 1 + 2 * n) for n, line in enumerate(lines))
    runs = [
        list(run)
        for _, run in groupby(
            numbered,
            lambda each: (each[0], each[1], None) if each[0] in encoders else (*each[:2], each[3]),
        )
    ]
    shards: list[tuple[int, list[int], int]] = []
    for run in runs:
        model, cost = run[0][0], max(1, run[0][2])
        whole = cost + TWIN_COST * (len(run) - 1)
        last = shards[-1][2] if shards and shards[-1][0] == model else budgets[model] + 1
        apart = last + whole > budgets[model] and whole <= budgets[model]
        for position, (*_, line) in enumerate(run):
            own = TWIN_COST if position else cost
            fits = shards and shards[-1][0] == model and shards[-1][2] + own <= budgets[model]
            if fits and not (apart and position == 0):
                shards[-1] = (model, [*shards[-1][1], line], shards[-1][2] + own)
            else:
                shards.append((model, [line], cost))
    return shards


@given(lines_of, budgets_of)
def test_the_cut_equals_the_slow_one(lines: list[Line], budgets: list[float]) -> None:
    assert list(cut(costs(lines), budgets)) == reference(lines, budgets)


@given(lines_of, budgets_of, encoders_of)
def test_the_cut_of_lines_to_encode_equals_the_slow_one(
    lines: list[Line], budgets: list[float], encoders: frozenset[int]
) -> None:
    twins = alike(lines)
    assert list(cut(costs(twins), budgets, encoders)) == reference(twins, budgets, encoders)


@given(lines_of, budgets_of, encoders_of)
def test_every_line_stands_once_and_every_shard_keeps_its_budget(
    lines: list[Line], budgets: list[float], encoders: frozenset[int]
) -> None:
    lines = alike(lines)
    shards = list(cut(costs(lines), budgets, encoders))
    placed = [line for _, shard, _ in shards for line in shard]
    assert sorted(placed) == [1 + 2 * n for n in range(len(lines))]
    for model, shard, cost in shards:
        assert cost <= budgets[model] or len(shard) == 1
        assert {lines[line // 2][0] for line in shard} == {model}
        if model not in encoders:
            assert cost == sum(max(1, lines[line // 2][2]) for line in shard)


@pytest.mark.parametrize("encoders", [frozenset[int](), frozenset({0})])
def test_a_shard_of_tiny_lines_has_a_most_number(encoders: frozenset[int]) -> None:
    number = plan.MAX_SHARD_LINES * 2 + 1
    shards = list(cut(costs([(0, 0, 0)] * number), [1e12], encoders))
    assert [len(lines) for _, lines, _ in shards] == [
        plan.MAX_SHARD_LINES,
        plan.MAX_SHARD_LINES,
        1,
    ]


def test_lines_that_begin_alike_are_neighbours_and_short_ones_come_first() -> None:
    lines = [(0, 7, 9), (0, 3, 5), (0, 7, 2), (0, 3, 5)]
    assert list(cut(costs(lines), [1_000.0])) == [(0, [3, 7, 5, 1], 21)]


def test_twins_are_not_parted_where_a_shard_can_hold_them() -> None:
    lines = [(0, 1, 6), (0, 2, 6), (0, 2, 6), (0, 2, 6), (0, 3, 6)]
    assert list(cut(costs(lines), [8.0], frozenset({0}))) == [
        (0, [1], 6),
        (0, [3, 5, 7], 8),
        (0, [9], 6),
    ]
    # Where none can, they are parted late: each shard computes them once.
    many = [(0, 2, 6)] * 5
    assert list(cut(costs(many), [8.0], frozenset({0}))) == [(0, [1, 3, 5], 8), (0, [7, 9], 7)]


def embed(*texts: tuple[int, ...]) -> Embed:
    body = check.embeddings({"model": "m", "input": "x"}, RULES)
    return Embed(body, tuple(Reading(tokens) for tokens in texts))


def test_lines_to_encode_are_sorted_by_length_and_twins_have_the_same_key() -> None:
    short, long, twin, other = (
        plan.weigh(embed(tokens)) for tokens in [(9,), (1, 2), (1, 2), (2, 1)]
    )
    assert long == twin
    assert (short[0], long[0]) == (1, 2)
    assert short[1] < min(long[1], other[1])
    assert long[1] != other[1]
    # The same tokens in other texts are other work.
    assert plan.weigh(embed((1,), (2,)))[1] != long[1]


def test_labels_that_lines_share_cost_a_line_next_to_nothing() -> None:
    body = {"model": "m", "input": "x", "labels": ["a", "b"]}
    checked = check.classify(body, RULES, ModelKind.EMBED)
    labels = (Reading((5,) * 50), Reading((6,) * 50))
    assert plan.weigh(ZeroShot(checked, (Reading((1,) * 10),), labels))[0] == 10 + 2


def test_lines_to_generate_have_the_key_of_their_first_tokens() -> None:
    def key(*prompt: int, most: int = 4) -> int:
        body = check.completion({"model": "m", "prompt": "x"}, RULES)
        return plan.weigh(Generate(body, (prompt,), Sampling(max_tokens=most), 1, StubTokenizer()))[
            1
        ]

    begin = tuple(range(plan.PREFIX_TOKENS))
    assert key(*begin, 1) == key(*begin, 2, 3)
    assert key(*begin[:-1]) != key(*begin)
