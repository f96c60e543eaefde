"""Does the CUDA way of generating write what transformers writes? Interpreted, on a CPU.

The schedule, the slots, the arrays that say what is read and the kernels are the device's own; only
the chip is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.capture import Run
from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate import probe, triton_spans
from engine.generate.continuous import ContinuousLoop
from engine.generate.decode_graphs import DecodeGraphs, buckets
from engine.generate.kv import Heads
from engine.generate.kv_room import bytes_of_a_step, tokens_that_fit, tokens_within
from engine.generate.probe import continuous_forward
from engine.generate.readers import READER, Planned, Readers, nobody
from engine.generate.span_forward import SPANS, SpanForward
from engine.model.load import load_decoder
from engine.plan.schedule import Asked, Schedule
from engine.plan.slots import Slots
from engine.request import GenerateRequest
from tests.unit.engine.test_continuous import drain, greedy, reference, tokens_of

pytestmark = pytest.mark.skipif(
    not triton_spans.INTERPRETED, reason="on a device, tests/gpu says it of the device itself"
)

MakeDecoder = Callable[[str], Path]


def prompts() -> list[tuple[int, ...]]:
    """Three that begin alike, one that stands alone."""
    draw = torch.Generator().manual_seed(5)

    def some(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 259, (length,), generator=draw).tolist())

    head = some(18)
    return [head + some(2), head + some(7), head + some(1), some(5)]


def asked() -> list[GenerateRequest]:
    return [GenerateRequest(n, prompt, greedy(4)) for n, prompt in enumerate(prompts())]


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a CUDA device is done on the CPU, by one program after another."""
    monkeypatch.setattr(probe, "_way", lambda *_, **__: (SpanForward, SPANS))
    monkeypatch.setattr(triton_spans, "_PROGRAMS", 1)
    monkeypatch.setattr(probe, "_MORE", 1)


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    options = {"context_length": 128, "prefill_tokens": 24, **changes}
    return EngineConfig(model=folder, kind=Kind.GENERATE, **options)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_greedy_tokens_equal_those_of_transformers(make_decoder: MakeDecoder, name: str) -> None:
    folder = make_decoder(name)
    engine = Engine(config_of(folder))
    assert engine.status.path == "packed"
    assert tokens_of(dict(engine.run(asked()))) == reference(folder, 4, prompts)
    assert engine.counters.cached_tokens > 0


def uncaptured(graphs: list[int]) -> Callable[[Run], Run]:
    """Instead of a capture: runs what would be replayed, and notes how often."""

    def capture(run: Run) -> Run:
        run()

        def replay() -> torch.Tensor:
            graphs.append(1)
            return run()

        return replay

    return capture


@pytest.mark.parametrize("most_rows", [2, 4])
def test_steps_that_are_replayed_come_out_as_they_do_without(
    make_decoder: MakeDecoder, most_rows: int
) -> None:
    folder = make_decoder("llama")
    config = config_of(folder)
    decoder = load_decoder(config)
    replays: list[int] = []
    with torch.inference_mode():
        found = continuous_forward(decoder, config.cache_tokens)
        assert found is not None
        forward, tokens = found
        assert isinstance(forward, SpanForward)
        forward._graphs = DecodeGraphs(
            forward.run, decoder.device, most_rows, capture=uncaptured(replays)
        )
    results = drain(ContinuousLoop(decoder, forward, tokens, config), asked())
    assert tokens_of(results) == reference(folder, 4, prompts)
    assert bool(replays) == (most_rows == 4)  # four run at once; larger steps run without


def test_the_largest_graph_is_captured_first_and_a_failure_leaves_the_others() -> None:
    tried: list[int] = []

    def run(readers: Readers) -> torch.Tensor:
        tried.append(readers.single)
        if readers.single == 16:
            raise torch.OutOfMemoryError
        return torch.zeros(readers.single, 7)

    graphs = DecodeGraphs(run, torch.device("cpu"), 20, capture=lambda run: (run(), run)[1])
    assert tried == [20, 16, 8, 4, 2, 1]
    assert graphs._sizes == [1, 2, 4, 8, 20]


def test_a_model_that_cannot_be_captured_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(readers: Readers) -> torch.Tensor:
        msg = "operation not permitted when stream is capturing"
        raise RuntimeError(msg)

    graphs = DecodeGraphs(run, torch.device("cpu"), 64, capture=lambda run: (run(), run)[1])
    assert graphs._sizes == []
    assert len(caplog.records) == 1
    assert graphs.replay(planned_decode(3)) is None


def test_buckets_end_with_the_most_rows_that_run() -> None:
    assert buckets(1) == [1]
    assert buckets(5) == [1, 2, 4, 5]
    assert buckets(40) == [1, 2, 4, 8, 16, 32, 40]


def planned_decode(count: int) -> Planned:
    """A step that makes the next token of so many sequences with a beginning in common."""
    schedule = Schedule(Slots(4096), limit=4096, max_rows=count)
    schedule.add(Asked(n, (*range(3, 43), 50 + n), 9) for n in range(count))
    step = schedule.plan(512)
    schedule.done(step)
    for piece in step.pieces:
        if piece.samples:
            schedule.append(piece.strand, 7)  # type: ignore[arg-type]  # it samples, so no stem
    return Planned(schedule.plan(512))


def test_a_step_in_larger_room_says_the_same_and_of_nobody_nothing() -> None:
    planned = planned_decode(3)
    need = planned.room
    assert (need.rows, need.sampled, need.readers) == (3, 3, 3)
    assert need.spans == 6  # of each the beginning in common, and its own
    room = type(need)(rows=5, sampled=5, readers=5, spans=40)
    assert room.holds(need)
    assert not need.holds(room)

    def views(room: Any) -> Readers:
        numbers = torch.from_numpy(planned.numbers(room))
        return Readers.of(numbers, room, single=room.readers, longest=1)

    exact, roomy = views(need), views(room)
    for name in ("ids", "positions", "cells", "sampled", "readers", "spans"):
        own = getattr(exact, name)
        assert torch.equal(getattr(roomy, name)[: len(own)], own)
    assert exact.positions.tolist() == [41, 41, 41]
    assert (roomy.cells[3:, 2] == -1).all()
    assert roomy.readers[3:].tolist() == [[3, 1, 0, 0, 0], [4, 1, 0, 0, 0]]
    empty = torch.from_numpy(nobody(room))
    assert empty.shape == torch.from_numpy(planned.numbers(room)).shape
    assert roomy.readers.shape[1] == READER


LAYERS = [Heads(8, 64, 64)] * 16


def test_memory_is_cut_into_whole_slabs_that_fit() -> None:
    token = 16 * 8 * 128 * 2
    for spare in (0, token * 100, token * 50_000 + 1, 80 << 30):
        tokens = tokens_within(spare, LAYERS, 2)
        assert Slots(tokens).total == tokens
        assert tokens * token <= max(spare, 48 * token)
    assert tokens_within(80 << 30, LAYERS, 2) > 0.95 * (80 << 30) / token


def test_what_a_step_takes_is_left_free(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(make_decoder("llama"))
    decoder = load_decoder(config)
    free = 400 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2 * free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8 << 20)
    layers = [Heads(2, 8, 8)] * 2
    step = bytes_of_a_step(decoder.model.config, decoder.vocab_size, config)
    tokens = tokens_that_fit(decoder, config, layers)
    taken = tokens * 2 * 2 * 16 * 4
    assert 0.8 * free < taken + step <= 0.9 * free
    bounded = config_of(make_decoder("llama"), memory_bytes=100 << 20)
    assert tokens_that_fit(decoder, bounded, layers) < tokens / 3
    assert step > np.prod([config.max_sequences, decoder.vocab_size, 4])
