"""Does the device write what transformers writes on a CPU, by kernels that do as SDPA does?"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import GenerateRequest, Generation, Sampling
from tests.gpu.models import TINY_DECODERS, save

pytestmark = pytest.mark.gpu

NEW = 24
SHARED = 150


@pytest.fixture(scope="module", params=TINY_DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model; weights ×4, so that the likeliest token is so by far."""
    made = TINY_DECODERS[request.param]
    where = tmp_path_factory.mktemp(request.param)
    return save(made, where, "cpu", gain=4, auto=transformers.AutoModelForCausalLM)


def prompts(count: int = 40) -> list[tuple[int, ...]]:
    """Of 1 to 300 tokens, half of them with a long beginning in common."""
    draw = random.Random(3)
    head = draw.choices(range(4, 128), k=SHARED)
    lengths = [draw.choice([1, 2, 9, 33, 70, 150, 300]) for _ in range(count)]
    own = [draw.choices(range(4, 128), k=length) for length in lengths]
    return [(*head, *text) if n % 2 else tuple(text) for n, text in enumerate(own)]


def engine_of(folder: Path, device: str, **changes: Any) -> Engine:
    options = {"context_length": 600, "prefill_tokens": 256, "cache_tokens": 16384, **changes}
    return Engine(EngineConfig(model=folder, kind=Kind.GENERATE, device=device, **options))


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    sampling = Sampling(max_tokens=NEW, temperature=0.0)
    results = dict(engine.run(GenerateRequest(n, p, sampling) for n, p in enumerate(prompts)))
    found = []
    for n in range(len(prompts)):
        result = results[n]
        assert isinstance(result, Generation), result
        found.append(result.token_ids)
    return found


def slowly(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """transformers' own generate on the CPU in float32, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
        )
        found.append(tuple(output[0, len(prompt) :].tolist()))
    return found


def test_greedy_tokens_are_those_of_transformers(device: str, folder: Path) -> None:
    engine = engine_of(folder, device)
    assert engine.status.path == "packed"
    assert answers(engine, prompts()) == slowly(folder, prompts())
    assert engine.counters.cached_tokens > SHARED


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_found_right_and_the_same_file_has_the_same_tokens(
    device: str, folder: Path, dtype: str
) -> None:
    if device == "cpu" and dtype == "float16":
        pytest.skip("not a dtype for CPUs")
    first, second = (engine_of(folder, device, dtype=dtype) for _ in range(2))
    assert first.status.path == "packed"
    assert answers(first, prompts()) == answers(second, prompts())


def test_steps_that_are_replayed_write_the_same(cuda: torch.device, folder: Path) -> None:
    engine = engine_of(folder, "cuda", cuda_graphs=True, max_sequences=20)
    graphs = engine._loop._forward._graphs  # type: ignore[union-attr]
    if "gpt-oss" not in folder.name:  # its experts are chosen on the host
        assert sorted(graphs._graphs) == [1, 2, 4, 8, 16, 20]
    assert answers(engine, prompts()) == answers(engine_of(folder, "cuda"), prompts())


def test_answers_are_the_same_after_preemption(cuda: torch.device, folder: Path) -> None:
    """Keys and values of a few hundred tokens; tiny steps, so that the rest is small too."""
    texts = [prompt[-20:] for prompt in prompts(12)]
    roomy = engine_of(folder, "cuda")
    token = 3 * 2 * 2 * 16 * 4
    scores = 8 * 128 * 40
    small = engine_of(
        folder, "cuda", max_sequences=8, prefill_tokens=16, memory_bytes=2 * (scores + 400 * token)
    )
    list(small.run([GenerateRequest("short", (5,), Sampling(max_tokens=1, temperature=0.0))]))
    assert answers(small, texts) == answers(roomy, texts)
