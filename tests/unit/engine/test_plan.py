"""Are batches within their budget, alike in length, and made in order?"""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.plan.buckets import bucket_floor, bucket_of
from engine.plan.budget import Budget
from engine.plan.waiting import Waiting


@dataclass(frozen=True)
class Item:
    id: int
    length: int
    group: int


def waiting() -> Waiting[Item]:
    return Waiting(lambda item: item.length)


def within(budget: int, rows: int):  # noqa: ANN201 a closure for take()
    def fits(batch: list[Item]) -> bool:
        return len(batch) <= rows and max(i.length for i in batch) * len(batch) <= budget

    return fits


def items(groups: list[list[int]]) -> list[list[Item]]:
    numbers = iter(range(10_000))
    return [
        [Item(next(numbers), length, group) for length in lengths]
        for group, lengths in enumerate(groups)
    ]


GROUPS = st.lists(st.lists(st.integers(1, 900), max_size=20), max_size=6)


@given(groups=GROUPS, budget=st.integers(1, 4000), rows=st.integers(1, 16))
def test_every_request_is_taken_once_in_batches_that_keep_the_rules(
    groups: list[list[int]], budget: int, rows: int
) -> None:
    queue = waiting()
    for group in items(groups):
        queue.add(group)
    left = {item.id: item for group in items(groups) for item in group}
    while left:
        batch = queue.take(within(budget, rows))
        oldest = min(item.group for item in left.values())
        longest = max(item.length for item in left.values() if item.group == oldest)
        assert (batch[0].group, batch[0].length) == (oldest, longest)
        assert len(batch) == 1 or within(budget, rows)(batch)
        assert {bucket_of(item.length) for item in batch} == {bucket_of(longest)}
        assert [item.length for item in batch] <= [longest] * len(batch)
        for item in batch:
            del left[item.id]
    assert queue.take(within(budget, rows)) == []
    assert len(queue) == 0


def test_like_lengths_of_younger_groups_fill_a_batch() -> None:
    queue = waiting()
    for group in items([[100, 20], [99, 97, 101, 64], [128, 98]]):
        queue.add(group)
    assert [item.length for item in queue.take(within(100 * 4, 8))] == [100, 99, 97, 98]


def test_what_is_put_back_comes_first_and_what_is_removed_never() -> None:
    queue = waiting()
    first, second = items([[50, 50, 50], [60]])
    queue.add(first)
    queue.add(second)
    taken = queue.take(within(100, 8))
    queue.put_back(taken)
    queue.remove({taken[0].id, second[0].id})
    assert len(queue) == 2
    assert {item.id for item in queue.take(within(1000, 8))} == {item.id for item in first} - {
        taken[0].id
    }


@given(length=st.integers(1, 100_000))
def test_buckets_follow_each_other_without_gaps(length: int) -> None:
    border, floor = bucket_of(length), bucket_floor(length)
    assert floor < length <= border
    assert bucket_of(border) == border
    assert bucket_floor(border + 1) == border
    assert border <= 2 * max(floor, 16)


def test_the_first_buckets_are_those_of_the_design() -> None:
    borders = sorted({bucket_of(length) for length in range(1, 513)})
    assert borders == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]


@given(limit=st.integers(1, 10**6), capacity=st.integers(1, 10**6))
def test_shortages_come_to_an_end(limit: int, capacity: int) -> None:
    budget = Budget.of(limit)
    shortages = 0
    for _ in range(400):
        cost = budget.current
        if cost > capacity and cost > 1:
            budget = budget.after_out_of_memory(cost)
            shortages += 1
            assert budget.current <= cost // 2
        else:
            budget = budget.after_success()
        assert 1 <= budget.current <= budget.ceiling <= limit
    assert shortages <= 60


@given(limit=st.integers(1, 10**6), capacity=st.integers(1, 10**6))
def test_a_lasting_shortage_costs_few_batches(limit: int, capacity: int) -> None:
    budget = Budget.of(limit)
    failed: list[bool] = []
    for _ in range(2_000):
        failed.append(budget.current > max(1, capacity))
        cost = budget.current
        budget = budget.after_out_of_memory(cost) if failed[-1] else budget.after_success()
    assert sum(failed[200:]) <= len(failed[200:]) / 32


@given(limit=st.integers(1, 10**6), capacity=st.integers(1, 10**6))
def test_a_shortage_that_passes_leaves_no_trace(limit: int, capacity: int) -> None:
    budget = Budget.of(limit)
    while budget.current > capacity:
        budget = budget.after_out_of_memory(budget.current)
    for _ in range(10_000):
        budget = budget.after_success()
    assert (budget.current, budget.ceiling) == (limit, limit)


def test_one_request_to_blame_leaves_the_ceiling_where_it_was() -> None:
    budget = Budget.of(512)
    while budget.current > 1:
        budget = budget.after_out_of_memory(budget.current)
    budget = budget.after_out_of_memory(1).after_blame()
    for _ in range(8):
        budget = budget.after_success()
    assert budget.current == 512


@given(fits=st.integers(1, 5_000), over=st.integers(1, 5_000), hopeless=st.integers(1, 100))
def test_sequences_that_never_fit_leave_room_for_what_does(
    fits: int, over: int, hopeless: int
) -> None:
    budget = Budget.of(4_096)
    for _ in range(2 * hopeless):  # each of them is tried twice
        budget = budget.after_out_of_memory(fits + over)
    for _ in range(12):
        budget = budget.after_success()
    assert budget.current >= min(4_096, (fits + over) * 3 // 4)
