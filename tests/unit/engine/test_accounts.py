"""Is each answer charged for what was computed for it, and for the time that this took?"""

import pytest

from engine.generate.accounts import Accounts
from tests.clocks import Hand


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def accounts(hand: Hand) -> Accounts:
    return Accounts(hand)


def test_a_step_s_time_is_shared_by_tokens(hand: Hand, accounts: Accounts) -> None:
    hand.now += 8
    accounts.note([("a", 30), ("b", 10)], ["a", "b"], began=100.0)
    a, b = accounts.close("a"), accounts.close("b")
    assert (a.seconds, a.computed_tokens, a.rows) == (6.0, 30, 2)
    assert (b.seconds, b.computed_tokens, b.rows) == (2.0, 10, 2)


def test_what_was_computed_for_nobody_who_still_runs_is_nobody_s(
    hand: Hand, accounts: Accounts
) -> None:
    hand.now += 4
    accounts.note([(None, 3), ("a", 1)], ["a"], began=100.0)
    assert accounts.close("a").seconds == 1.0
    assert len(accounts) == 0


def test_the_first_token_counts_from_the_first_piece_of_the_prompt_and_later_ones_from_it(
    hand: Hand, accounts: Accounts
) -> None:
    hand.now = 102.0
    accounts.note([("a", 64)], [], began=100.0)
    hand.now = 105.0
    accounts.note([("a", 8)], ["a"], began=103.0)
    for _ in range(3):
        hand.now += 1.5
        accounts.note([("a", 1)], ["a"], began=hand.now - 1.0)
    work = accounts.close("a")
    assert (work.first_token_s, work.later_tokens_s) == (5.0, 4.5)


def test_rows_are_a_mean_over_its_steps(accounts: Accounts) -> None:
    accounts.note([("a", 1), ("b", 1)], ["a"], began=100.0)
    accounts.note([(name, 1) for name in "abcdef"], ["a"], began=100.0)
    assert accounts.close("a").rows == 3  # harmonic: it had a half and a sixth of two steps


def test_an_answer_that_is_dropped_leaves_nothing(accounts: Accounts) -> None:
    accounts.note([("a", 1)], [], began=100.0)
    accounts.drop("a")
    accounts.drop("never began")
    assert len(accounts) == 0
