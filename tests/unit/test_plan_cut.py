"""Is a batch cut into shards that hold every line once, within the budget, neighbours together?"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker import plan
from worker.plan import Costs, cut

Line = tuple[int, int, int]  # model, prefix, tokens

lines_of = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=2),
        st.integers(min_value=0, max_value=3) | st.integers(min_value=0, max_value=2**64 - 1),
        st.integers(min_value=0, max_value=30),
    ),
    max_size=60,
)
budgets_of = st.lists(st.floats(min_value=0.5, max_value=80), min_size=3, max_size=3)


def costs(lines: list[Line]) -> Costs:
    """Every second physical line holds a request, as if blank lines stood between."""
    return Costs(
        line=np.array([1 + 2 * n for n in range(len(lines))], dtype=np.int32),
        model=np.array([model for model, _, _ in lines], dtype=np.int32),
        prefix=np.array([prefix for _, prefix, _ in lines], dtype=np.uint64),
        tokens=np.array([tokens for _, _, tokens in lines], dtype=np.int32),
    )


def reference(lines: list[Line], budgets: list[float]) -> list[tuple[int, list[int], int]]:
    """The slow, obvious way: sort tuples, start a new shard whenever the next does not fit."""
    numbered = sorted((*line[:2], line[2], 1 + 2 * n) for n, line in enumerate(lines))
    shards: list[tuple[int, list[int], int]] = []
    for model, _prefix, tokens, line in numbered:
        cost = max(1, tokens)
        fits = shards and shards[-1][0] == model and shards[-1][2] + cost <= budgets[model]
        if fits:
            shards[-1] = (model, [*shards[-1][1], line], shards[-1][2] + cost)
        else:
            shards.append((model, [line], cost))
    return shards


@given(lines_of, budgets_of)
def test_the_cut_equals_the_slow_one(lines: list[Line], budgets: list[float]) -> None:
    assert list(cut(costs(lines), budgets)) == reference(lines, budgets)


@given(lines_of, budgets_of)
def test_every_line_stands_once_and_every_shard_keeps_its_budget(
    lines: list[Line], budgets: list[float]
) -> None:
    shards = list(cut(costs(lines), budgets))
    placed = [line for _, shard, _ in shards for line in shard]
    assert sorted(placed) == [1 + 2 * n for n in range(len(lines))]
    for model, shard, cost in shards:
        assert cost <= budgets[model] or len(shard) == 1
        assert {lines[line // 2][0] for line in shard} == {model}
        assert cost == sum(max(1, lines[line // 2][2]) for line in shard)


def test_a_shard_of_tiny_lines_has_a_most_number() -> None:
    number = plan.MAX_SHARD_LINES * 2 + 1
    shards = list(cut(costs([(0, 0, 0)] * number), [1e12]))
    assert [len(lines) for _, lines, _ in shards] == [
        plan.MAX_SHARD_LINES,
        plan.MAX_SHARD_LINES,
        1,
    ]


def test_lines_that_begin_alike_are_neighbours_and_short_ones_come_first() -> None:
    lines = [(0, 7, 9), (0, 3, 5), (0, 7, 2), (0, 3, 5)]
    assert list(cut(costs(lines), [1_000.0])) == [(0, [3, 7, 5, 1], 21)]
