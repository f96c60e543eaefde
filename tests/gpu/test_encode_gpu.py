"""Are packed vectors on the device those of a plain forward in float32 on the CPU?"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import Embedding, EncodeRequest
from tests.gpu.models import BEGIN, END, TINY, save, vectors_slowly

pytestmark = pytest.mark.gpu

# The largest difference of a number of a vector of length 1. Half precision rounds every layer's
# output to 8 or 11 bits.
BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def ragged(count: int) -> list[tuple[int, ...]]:
    """Token ids of texts of 3 to 300 tokens, some of like length."""
    draw = random.Random(3)
    lengths = [draw.choice([3, 5, 16, 16, 40, 77, 128, 300]) for _ in range(count)]
    return [
        (BEGIN, *(draw.randrange(4, 128) for _ in range(length - 2)), END) for length in lengths
    ]


def engine_of(folder: Path, device: str, **changes: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=folder,
            kind=Kind.EMBED,
            device=device,
            context_length=512,
            max_rows=512,
            **{"pooling": "mean", **changes},
        )
    )


def encode(engine: Engine, texts: list[tuple[int, ...]]) -> Tensor:
    """float32 [texts, width]"""
    results = dict(engine.run(EncodeRequest(n, text) for n, text in enumerate(texts)))
    rows = []
    for n in range(len(texts)):
        result = results[n]
        assert isinstance(result, Embedding), result
        rows.append(torch.from_numpy(result.vector))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", TINY)
def test_packed_vectors_are_those_of_a_plain_forward(
    device: str, tmp_path: Path, name: str, dtype: str
) -> None:
    made = TINY[name]
    folder = save(made, tmp_path, device, gain=2)
    texts = ragged(120)
    engine = engine_of(folder, device, dtype=dtype, pooling=made.pooling)
    found = encode(engine, texts)
    expected = vectors_slowly(folder, made.pooling, texts)
    assert (found - expected).abs().max() <= BOUNDS[dtype]
    assert torch.nn.functional.cosine_similarity(found, expected).min() >= 0.99
    assert engine.status.path == "packed"


def test_the_same_file_twice_has_the_same_bytes(device: str, tmp_path: Path) -> None:
    folder = save(TINY["bert"], tmp_path, device)
    texts = ragged(200)
    first, second = (encode(engine_of(folder, device, dtype="bfloat16"), texts) for _ in range(2))
    assert first.numpy().tobytes() == second.numpy().tobytes()


def test_a_shortage_in_the_forward_is_recovered_from(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(TINY["bert"], tmp_path, device)
    texts = ragged(60)
    engine = engine_of(folder, device, dtype="bfloat16")
    whole = PreTrainedModel.__call__
    left = [2]

    def short(model: Any, *args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError
        return whole(model, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "__call__", short)
    found = encode(engine, texts)
    assert engine.counters.out_of_memory == 2
    assert (found - vectors_slowly(folder, "mean", texts)).abs().max() <= BOUNDS["bfloat16"]
