"""Does a batch end in time where nobody works on it, and a worker when it is told to?"""

from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

import pytest

from tests.e2e.chaos.client import (
    FREE,
    Sent,
    check_files,
    check_rest,
    create,
    ended,
    hold,
    raw_id,
    upload,
)
from tests.e2e.chaos.phases import Hold, Phase, persistently
from tests.e2e.chaos.stack import LEASE_S, Stack, until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STOPS_WITHIN_S = 10.0
ENGINES = ("engine", "engine2")
AWAY_S = 25.0
HELD = (Phase.VALIDATE, Phase.PLAN, Phase.DRAIN, Phase.WRITE_BACK, Phase.ASSEMBLE)


@contextmanager
def _held(stack: Stack, phase: Phase, word: str) -> Iterator[tuple[Sent, Hold, str]]:
    """A new batch that stands in this phase until it is released, at the end at the latest."""
    stack.at_rest()
    sent = Sent.of(f"{word}/{phase}")
    held = hold(stack, phase, sent)
    try:
        batch = create(stack, upload(stack, sent))
        held.reached(raw_id(batch))
        yield sent, held, batch
    finally:
        held.release()


@pytest.mark.parametrize("phase", [Phase.DRAIN, Phase.WRITE_BACK])
def test_an_engine_worker_told_to_stop_keeps_what_is_finished_and_is_gone_in_ten_seconds(
    stack: Stack, phase: Phase
) -> None:
    with _held(stack, phase, "told to stop") as (sent, held, batch):
        children = [stack.member(name).child for name in ENGINES]
        for child in children:
            assert child is not None
            child.signal(Signals.SIGTERM)
        if phase is Phase.WRITE_BACK:
            held.release()  # what is being flushed is flushed first
        until(lambda: all(child.ended() for child in children if child), STOPS_WITHIN_S, "stopped")
    found = ended(stack, batch)
    assert (found["status"], check_files(stack, sent, found).refused) == ("completed", ["refused"])
    runs = stack.answered(f"{sent.word} ")
    assert max(runs.values()) == 1  # an answer that was there has been flushed
    check_rest(stack, raw_id(batch))


def test_a_cancel_comes_through_within_a_lease_and_ten_seconds_of_a_dead_worker(
    stack: Stack,
) -> None:
    with _held(stack, Phase.DRAIN, "cancel") as (sent, _, batch):
        for name in ENGINES:
            stack.kill(name, back_after_s=AWAY_S)
        path = f"batches/{batch}/cancel"
        reply = persistently(stack, lambda http: http.post(path)).json()
        assert reply["status"] in {"cancelling", "cancelled"}
        found = ended(stack, batch, within_s=LEASE_S + 10)
    assert found["status"] == "cancelled"
    files = check_files(stack, sent, found)
    assert len(files.output) >= FREE  # what was flushed is delivered
    assert files.lost == []
    check_rest(stack, raw_id(batch))


@pytest.mark.parametrize("phase", HELD)
def test_the_window_ends_by_the_clock_with_no_engine_worker_alive(
    stack: Stack, phase: Phase
) -> None:
    with _held(stack, phase, "expiry") as (sent, held, batch):
        for name in ENGINES:
            stack.kill(name, back_after_s=AWAY_S)
        if phase in {Phase.VALIDATE, Phase.PLAN}:
            # Whoever was at it is gone as well: one CPU worker is left.
            stack.kill(held.holder(), back_after_s=AWAY_S)
        stack.execute("UPDATE chaos.clock SET step = '25 hours'")
        try:
            held.release()
            found = ended(stack, batch, within_s=AWAY_S)
        finally:
            stack.execute("UPDATE chaos.clock SET step = '0'")
    files = check_files(stack, sent, found)
    assert files.lost == []
    if phase is Phase.ASSEMBLE:
        assert (found["status"], files.never_ran) == ("completed", [])
        return
    assert found["status"] == "expired"
    if phase is Phase.VALIDATE:
        assert (found["request_counts"]["total"], files.output) == (0, [])
    elif phase is Phase.DRAIN:
        assert len(files.output) >= FREE
