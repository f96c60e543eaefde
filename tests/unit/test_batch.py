"""Are the legal moves those of CONTRACT.md?"""

import pytest

from service.batch import (
    MOVES,
    SHARD_MOVES,
    TERMINAL,
    BatchStatus,
    IllegalMove,
    ShardState,
    before,
)

CONTRACT = {
    "validating": {"in_progress", "failed", "expired", "cancelling"},
    "in_progress": {"finalizing", "expired", "cancelling"},
    "finalizing": {"completed"},
    "cancelling": {"cancelled"},
}


def test_the_moves_are_those_of_the_contract() -> None:
    written = {str(old): {str(new) for new in after} for old, after in MOVES.items() if after}
    assert written == CONTRACT
    assert set(MOVES) == set(BatchStatus)


def test_the_terminal_states_are_final() -> None:
    assert {"completed", "failed", "expired", "cancelled"} == TERMINAL


@pytest.mark.parametrize("status", BatchStatus)
def test_before_is_the_moves_read_backwards(status: BatchStatus) -> None:
    assert before(status) == {old for old in BatchStatus if status in MOVES[old]}


def test_every_state_but_the_first_can_be_reached() -> None:
    assert {status for status in BatchStatus if not before(status)} == {BatchStatus.VALIDATING}


def test_a_shard_ends_once() -> None:
    assert set(SHARD_MOVES) == set(ShardState)
    assert not SHARD_MOVES[ShardState.DONE]
    assert not SHARD_MOVES[ShardState.DEAD]


def test_an_illegal_move_says_where_to() -> None:
    assert "completed" in str(IllegalMove(BatchStatus.COMPLETED))
