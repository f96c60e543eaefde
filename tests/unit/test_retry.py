"""Which failures are tried again, how often, and when?"""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.retry import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    Again,
    Final,
    LineFailure,
    decide,
    luck,
)

NOW = datetime(2025, 1, 1, tzinfo=UTC)
CURABLE = [LineFailure.TOO_LONG, LineFailure.INVALID]
PASSING = [LineFailure.OUT_OF_MEMORY, LineFailure.INTERNAL]


def decided(failure: LineFailure, attempts: int, at: float = 0.5, most: int = 3) -> Final | Again:
    return decide(failure, attempts=attempts, max_attempts=most, now=NOW, luck=at)


@pytest.mark.parametrize("failure", CURABLE)
def test_what_the_client_can_cure_is_final_at_once(failure: LineFailure) -> None:
    assert decided(failure, 1) == Final(400)


def test_a_vector_that_stayed_non_finite_is_final_at_once() -> None:
    assert decided(LineFailure.NON_FINITE, 1) == Final(500)


@pytest.mark.parametrize("failure", PASSING)
def test_what_may_pass_is_tried_so_often_and_no_more(failure: LineFailure) -> None:
    assert isinstance(decided(failure, 1), Again)
    assert isinstance(decided(failure, 2), Again)
    assert decided(failure, 3) == Final(500)
    assert decided(failure, 4) == Final(500)
    assert decided(failure, 1, most=1) == Final(500)


@given(
    st.sampled_from(PASSING),
    st.integers(min_value=1, max_value=60),
    st.floats(min_value=0, max_value=1, exclude_max=True),
)
def test_the_wait_is_spread_over_a_span_that_doubles_up_to_its_limit(
    failure: LineFailure, attempts: int, at: float
) -> None:
    again = decided(failure, attempts, at, most=100)
    assert isinstance(again, Again)
    span = min(FIRST_DELAY_S * 2 ** (attempts - 1), LONGEST_DELAY_S)
    assert NOW <= again.at <= NOW + timedelta(seconds=span)
    assert decided(failure, attempts, 0.0, most=100) == Again(NOW)


def test_every_failure_has_a_decision() -> None:
    for failure in LineFailure:
        assert isinstance(decided(failure, 1), Final | Again)


def test_luck_lies_between_nothing_and_one() -> None:
    assert all(0 <= luck() < 1 for _ in range(1_000))
