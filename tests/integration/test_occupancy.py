"""Are a generating engine's seats taken from shard to shard, however few lines a shard has?

The engine waits with each step until its worker has claimed what it would claim: what is counted is
how much is claimed, not how fast.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import Result
from tests import invariants
from tests.pipeline import Pipeline, chat_line
from tests.unit.engine.conftest import DECODERS, write_tokenizer
from worker.drain import Drain

SEATS = 8
LINES = 60


class Unhurried(Engine):
    """Takes no step before `ready` says so."""

    def __init__(self, config: EngineConfig, ready: Callable[[], bool]) -> None:
        super().__init__(config)
        self._ready = ready

    def step(self) -> list[Result]:
        if self._ready():
            return super().step()
        time.sleep(0.001)
        return []


class Wakes:
    """Runs a drain in threads of its own, as the messages of the broker would."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._runs: list[Future[None]] = []
        self.drained: Drain | None = None

    def drain(self, _model: str) -> None:
        assert self.drained is not None
        self._runs.append(self._threads.submit(self.drained.run))

    def assemble(self) -> None:
        """Left to the test."""

    def waiting(self) -> bool:
        """Whether every thread waits for the engine: nobody claims, reads, or writes back."""
        if self.drained is None:
            return False
        loop, at_work = self.drained._on.loop, sum(not run.done() for run in self._runs)
        asked = {id(inbox) for inbox in loop._inboxes.values()}
        coming = any(tuple(self.drained._coming.values())) or loop._handed_in > loop._taken
        return not coming and len(asked) == at_work

    def wait(self) -> None:
        """Until no thread is left."""
        for run in self._runs:  # which grows meanwhile
            run.result()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(DECODERS["llama"]()).save_pretrained(folder)
    write_tokenizer(folder, ends=False)
    return folder


def planned(pipeline: Pipeline) -> Any:
    """A batch of short lines, whose answers differ much in length, three or four to a shard."""
    lines = [
        chat_line(f"line {n}", f"{n}", max_tokens=2 + 7 * n % 19, ignore_eos=True, temperature=0)
        for n in range(LINES)
    ]
    batch_id = pipeline.submit(lines, "/v1/chat/completions")
    pipeline.validate()
    pipeline.plan()
    return batch_id


def test_seats_are_taken_until_the_last_shard_is_claimed(pipeline: Pipeline, tiny: Path) -> None:
    small = pipeline.having(shard_s=0.12)
    batch_id = planned(small)
    shards = small.shards(batch_id)
    assert len(shards) >= 12
    assert max(len(shard.lines) for shard in shards) * 2 <= SEATS  # two of them fill no engine
    wakes = Wakes()
    config = EngineConfig(model=tiny, kind=Kind.GENERATE, max_sequences=SEATS, context_length=64)
    woken = replace(small, resources=replace(small.resources, waker=wakes))  # type: ignore[arg-type]
    with woken.engine("stub-chat", lambda: Unhurried(config, wakes.waiting)) as wakes.drained:
        wakes.drain("stub-chat")
        wakes.wait()
        figures = wakes.drained._on.loop.figures()
    assert figures.running / figures.seats >= 0.95
    small.assemble()
    small.clean()
    assert invariants.check(small, batch_id).completed == LINES
