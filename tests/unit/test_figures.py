"""Is the engine's time counted as it passes, and a line's as the engine says it?"""

import numpy as np
import pytest

from engine.request import Embedding, FinishReason, Generation, Work
from engine.surface import Counters
from service.db.lines import Effort
from tests.clocks import Hand
from worker.figures import RECENT, Recent, Seats, Standstill, effort_of, percentile


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def still(hand: Hand) -> Standstill:
    return Standstill(hand)


def test_an_engine_without_shards_does_not_stand_still(hand: Hand, still: Standstill) -> None:
    hand.now += 5
    assert still.seconds == 0
    with still.shard():
        hand.now += 0.5
    hand.now += 5
    assert still.seconds == 0.5


def test_an_engine_that_works_does_not_stand_still(hand: Hand, still: Standstill) -> None:
    with still.shard():
        hand.now += 1  # the shard is read and tokenised
        still.work(working=True)
        hand.now += 20
        still.work(working=False)
        hand.now += 2  # it is written back
    assert still.seconds == 3


def test_an_engine_that_has_one_shard_while_another_is_read_does_not_stand_still(
    hand: Hand, still: Standstill
) -> None:
    with still.shard():
        still.work(working=True)
        with still.shard():
            assert still.open_shards == 2
            hand.now += 4
        still.work(working=False)
    assert still.seconds == 0
    assert still.open_shards == 0


def test_standing_still_is_seen_while_it_lasts(hand: Hand, still: Standstill) -> None:
    with still.shard():
        hand.now += 1
        assert still.seconds == 1
        hand.now += 1
        assert still.seconds == 2


def test_percentiles_are_of_the_last_lines_and_sums_of_all() -> None:
    recent = Recent()
    recent.add([1_000.0] * 10)
    recent.add([0.5] * RECENT)
    count, total, last = recent.read()
    assert (count, total) == (RECENT + 10, 10_000 + RECENT / 2)
    assert list(last) == [0.5] * RECENT


@pytest.mark.parametrize(
    ("values", "half", "most"),
    [([], None, None), ([3.0], 3.0, 3.0), ([1.0, 2.0], 1.0, 2.0), ([*range(1, 101)], 50, 95)],
)
def test_a_percentile_is_one_of_the_values(
    values: list[float], half: float | None, most: float | None
) -> None:
    assert (percentile(values, 0.5), percentile(values, 0.95)) == (half, most)


def vector(tokens: int, work: Work) -> Embedding:
    return Embedding("x", np.zeros(2, dtype=np.float32), tokens, work)


def test_the_effort_of_a_line_is_that_of_its_sequences() -> None:
    results = [
        vector(10, Work(computed_tokens=12, seconds=0.25, rows=4)),
        vector(20, Work(computed_tokens=20, seconds=0.5, rows=2)),
        vector(20, Work(rows=2)),  # a twin
    ]
    assert effort_of(results) == Effort(32, 30, 0.75, 2, 0.75)


def test_steps_that_are_not_full_count_only_while_there_is_more_to_run() -> None:
    seats, so_far = Seats(), Counters()
    for more, running, possible in ((True, 2, 8), (True, 8, 8), (False, 8, 8), (False, 3, 8)):
        seats.more = more
        after = so_far + Counters(running=running, seats=possible)
        seats.note(so_far, after)
        so_far = after
    assert (seats.running, seats.possible) == (18, 24)


def test_the_effort_of_an_answer_tells_its_first_token_from_the_later_ones() -> None:
    work = Work(5, 1.0, 1, first_token_s=0.25, later_tokens_s=0.5, preempted=True)
    answer = Generation("x", "t", (1, 2, 3), FinishReason.STOP, 3, 0, 3, work)
    twin = Generation("y", "t", (1, 2, 3), FinishReason.STOP, 3, 2, 3, Work())
    effort = effort_of([answer, twin])
    assert (effort.first_token_s, effort.later_tokens, effort.later_tokens_s) == (0.25, 2, 0.5)
    assert effort.preempted == 1


def test_a_prompt_s_cached_beginning_is_no_padding() -> None:
    work = Work(computed_tokens=6, seconds=1.0, rows=1)
    answer = Generation("x", "t", (1, 2), FinishReason.STOP, 30, 26, 2, work)
    assert effort_of([answer]) == Effort(6, 6, 1.0, 1, 1.0, later_tokens=1)


def test_efforts_add_up_field_by_field() -> None:
    assert Effort(1, 2, 3.0, 4, 5.0, 6.0, 7, 8.0, 9) + Effort(
        10, 20, 30.0, 40, 50.0, 60.0, 70, 80.0, 90
    ) == Effort(11, 22, 33.0, 44, 55.0, 66.0, 77, 88.0, 99)
