"""Does planning a step cost as much, and an engine hold as much, after any number of requests?"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.plan.schedule import Asked, Schedule
from engine.plan.slots import Slots
from engine.request import GenerateRequest, Generation, Sampling

Decoder = Callable[[str], Path]


def lines_run(work: Callable[[], Any]) -> int:
    """How many lines of Python that takes, whatever the machine."""
    count = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def planning(waiting: int) -> int:
    """Lines of Python of 40 steps while at least so many requests wait."""
    schedule = Schedule(Slots(4096), limit=4096, max_rows=16)
    head = tuple(range(40))
    schedule.add(Asked(n, (*head, n % 251, n // 251), 4) for n in range(waiting + 200))

    def forty_steps() -> None:
        for _ in range(40):
            step = schedule.plan(64)
            schedule.done(step)
            for piece in step.pieces:
                if piece.samples:
                    if len(piece.strand.made) == 3:
                        schedule.finish(piece.strand)
                    else:
                        schedule.append(piece.strand, 1)

    return lines_run(forty_steps)


def test_planning_a_step_costs_the_same_however_many_wait() -> None:
    few, many = planning(100), planning(10_000)
    assert many <= 1.05 * few


def requests(first: int, count: int) -> list[GenerateRequest]:
    sampling = Sampling(max_tokens=3, temperature=0.0)
    head = tuple(3 + n % 200 for n in range(20))
    return [
        GenerateRequest(n, (*head, 3 + n % 250, 3 + n // 250), sampling)
        for n in range(first, first + count)
    ]


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_an_engine_holds_no_more_after_many_requests(
    make_decoder: Decoder, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "padded":
        monkeypatch.setattr("engine.engine.continuous_forward", lambda *_, **__: None)
    engine = Engine(EngineConfig(model=make_decoder("llama"), kind=Kind.GENERATE))
    assert engine.status.path == path

    def held_after(first: int, count: int) -> int:
        for _ in engine.run(requests(first, count)):
            pass
        gc.collect()
        return len(gc.get_objects())

    held_after(0, 100)
    before = held_after(100, 100)
    after = held_after(200, 1_000)
    assert after - before < 100  # a tenth of an object a request
    assert not engine.status.kv_held


def test_what_a_step_cost_is_shared_out_whole(make_decoder: Decoder) -> None:
    engine = Engine(EngineConfig(model=make_decoder("llama"), kind=Kind.GENERATE, max_sequences=4))
    results = [result for _, result in engine.run([*requests(0, 30), *requests_alike(30)])]
    answers = [result for result in results if isinstance(result, Generation)]
    assert len(answers) == 35
    done = engine.counters
    assert sum(answer.work.computed_tokens for answer in answers) == done.padded_tokens
    assert done.prefill_tokens + done.decode_tokens == done.padded_tokens
    for answer in answers:
        assert answer.work.first_token_s >= 0
        assert bool(answer.work.computed_tokens) == bool(answer.work.rows)
    # Four may run, and four do until the last few: 30 are all that is to be computed.
    assert done.running / done.seats > 0.9


def requests_alike(first: int) -> list[GenerateRequest]:
    """The same as one of the others, five times."""
    sampling = Sampling(max_tokens=3, temperature=0.0)
    prompt = requests(7, 1)[0].prompt
    return [GenerateRequest(first + n, prompt, sampling) for n in range(5)]
