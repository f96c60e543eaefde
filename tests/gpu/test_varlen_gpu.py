"""Does the device's own attention kernel do what each sequence alone would need?"""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.model.varlen import Bounds, attend, suits
from engine.request import Embedding, EncodeRequest
from tests.gpu.models import TINY, Made, attend_slowly, save

pytestmark = pytest.mark.gpu

LENGTHS = [300, 128, 128, 77, 16, 16, 16, 5, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 9), (True, 9)])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 64), (8, 2, 128), (2, 2, 40)])
def test_the_kernel_attends_as_each_sequence_alone_would(
    cuda: torch.device,
    dtype: torch.dtype,
    causal: bool,
    window: int | None,
    heads: int,
    key_heads: int,
    dim: int,
) -> None:
    assert suits(cuda, dtype, dim)
    torch.manual_seed(1)
    query = torch.randn(sum(LENGTHS), heads, dim, device=cuda, dtype=dtype)
    key, value = torch.randn(2, sum(LENGTHS), key_heads, dim, device=cuda, dtype=dtype)
    found = attend(
        query, key, value, Bounds.of(LENGTHS, cuda), scale=0.2, causal=causal, window=window
    )
    expected = attend_slowly(query, key, value, LENGTHS, scale=0.2, causal=causal, window=window)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)


def test_neighbours_and_room_left_over_change_no_bit_of_a_sequence(cuda: torch.device) -> None:
    torch.manual_seed(1)
    pack = torch.randn(3, sum(LENGTHS), 4, 64, device=cuda, dtype=torch.bfloat16)
    together = attend(*pack, Bounds.of(LENGTHS, cuda), scale=None, causal=False, window=None)
    alone = attend(*pack[:, :300], Bounds.of([300], cuda), scale=None, causal=False, window=None)
    roomy = Bounds(Bounds.of([*LENGTHS, 0, 0, 0], cuda).offsets, 512)
    with_room = attend(*pack, roomy, scale=None, causal=False, window=None)
    assert torch.equal(together[:300], alone)
    assert torch.equal(together, with_room)


def test_packs_that_are_replayed_come_out_as_they_do_without(
    cuda: torch.device, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=save(TINY["bert"], tmp_path, "cuda", gain=2),
        kind=Kind.EMBED,
        device="cuda",
        dtype="bfloat16",
        context_length=512,
        pooling="mean",
    )
    draw = random.Random(4)
    texts = [tuple(draw.randrange(4, 128) for _ in range(draw.randint(3, 300))) for _ in range(400)]
    made = []
    for graphs in (False, True, True):
        engine = Engine(dataclasses.replace(config, cuda_graphs=graphs))
        results = dict(engine.run(EncodeRequest(n, text) for n, text in enumerate(texts)))
        rows = [results[n] for n in range(len(texts))]
        made.append(torch.stack([torch.from_numpy(row.vector) for row in rows]))
    assert (made[0] - made[1]).abs().max() <= 2e-2
    assert torch.equal(made[1], made[2])


def test_a_device_that_is_full_is_recovered_from(cuda: torch.device, tmp_path: Path) -> None:
    """A pack of 32,768 tokens needs 256 MiB for one layer's widest product; 128 are left."""
    wide = Made(
        lambda: transformers.BertConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=4096,
            num_hidden_layers=2,
            num_attention_heads=1,
        )
    )
    folder = save(wide, tmp_path, "cuda")
    config = EngineConfig(
        model=folder,
        kind=Kind.EMBED,
        device="cuda",
        dtype="bfloat16",
        context_length=512,
        pooling="mean",
        token_budget=32768,
        max_rows=512,
    )
    draw = random.Random(2)
    texts = [tuple(draw.randrange(4, 128) for _ in range(512)) for _ in range(128)]
    engine = Engine(config)
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((used + (128 << 20)) / total)
    try:
        results = dict(engine.run(EncodeRequest(n, text) for n, text in enumerate(texts)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(isinstance(result, Embedding) for result in results.values())
    assert engine.counters.out_of_memory >= 1
