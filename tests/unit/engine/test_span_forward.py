"""Does the CUDA way of generating write what transformers writes? In triton's interpreter, on a CPU.

The schedule, the slots, the arrays that say what is read and the kernels are the device's own; only
the chip is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.capture import Run
from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate import probe
from engine.generate.continuous import ContinuousLoop
from engine.generate.decode_graphs import DecodeGraphs, buckets
from engine.generate.kv import Heads
from engine.generate.kv_room import bytes_of_a_step, tokens_within
from engine.generate.readers import Planned, Readers, nobody
from engine.generate.span_forward import SPANS, SpanForward
from engine.plan.slots import Slots
from engine.request import GenerateRequest
from tests.unit.engine.test_continuous import asked, drain, greedy, loop_of, reference, tokens_of

pytestmark = pytest.mark.usefixtures("as_on_cuda")

MakeDecoder = Callable[[str], Path]


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a CUDA device is done on the CPU."""
    monkeypatch.setattr(probe, "_way", lambda device: (SpanForward, SPANS))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt2", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers(make_decoder: MakeDecoder, name: str) -> None:
    folder = make_decoder(name)
    config = EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, prefill_tokens=40)
    engine = Engine(config)
    assert engine.status.path == "packed"
    assert tokens_of(dict(engine.run(asked(3)))) == reference(folder, 3)
    assert engine.counters.cached_tokens > 0
