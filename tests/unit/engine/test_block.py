"""Which layers become blocks, and do blocks compute what the layers did?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.generate.block import Block
from engine.model.int8 import has_fast_int8
from engine.model.linear import can_prepack
from engine.request import GenerateRequest, Generation, Sampling
from tests.unit.engine.conftest import LLAMA_LIKE
from tests.unit.engine.test_continuous import write_model

MakeDecoder = Callable[[str], Path]

pytestmark = pytest.mark.skipif(not can_prepack(), reason="this build has no prepacked layers")


def blocks_of(engine: Engine) -> list[nn.Module]:
    model: Any = engine._loop._decoder.model  # type: ignore[union-attr]  # a generating loop
    return [module for module in model.modules() if isinstance(module, Block)]


def engine_on(folder: Path, **changes: Any) -> Engine:
    return Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, **changes))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_layers_of_the_common_form_become_blocks(make_decoder: MakeDecoder, name: str) -> None:
    engine = engine_on(make_decoder(name))
    assert engine.status.path == "packed"
    assert len(blocks_of(engine)) == 2


OTHERS: dict[str, Callable[[], Any]] = {
    # Looks like a Llama's layer, but scales what it adds to the residual.
    "granite": lambda: transformers.GraniteConfig(**LLAMA_LIKE, residual_multiplier=0.5),
    # Turns only a part of each head.
    "stablelm": lambda: transformers.StableLmConfig(**LLAMA_LIKE, partial_rotary_factor=0.5),
    # Norms come after, not before.
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA_LIKE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_another_form_stay(tmp_path: Path, name: str) -> None:
    engine = engine_on(write_model(tmp_path, OTHERS[name]()))
    assert engine.status.path == "packed"
    assert not blocks_of(engine)


def test_only_the_layers_that_a_block_equals_are_replaced(tmp_path: Path) -> None:
    config = transformers.SmolLM3Config(**LLAMA_LIKE, no_rope_layers=[1, 0])
    engine = engine_on(write_model(tmp_path, config))
    assert engine.status.path == "packed"
    assert len(blocks_of(engine)) == 1  # the other one turns nothing


@pytest.mark.skipif(not has_fast_int8(), reason="this chip has no fast int8")
def test_a_model_in_int8_is_packed_too(make_decoder: MakeDecoder) -> None:
    engine = engine_on(make_decoder("llama"), quantize=Quantize.INT8)
    assert engine.status.path == "packed"
    assert len(blocks_of(engine)) == 2
    sampling = Sampling(max_tokens=5, temperature=0.0)
    [(_, answer)] = engine.run([GenerateRequest(0, tuple(range(3, 30)), sampling)])
    assert isinstance(answer, Generation)
    assert answer.output_tokens > 0


def test_biases_and_head_norms_are_kept(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8, attention_bias=True)
    folder = write_model(tmp_path, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            nn.init.normal_(getattr(layer.self_attn, part).bias)
        nn.init.uniform_(layer.self_attn.q_norm.weight, 0.5, 2)
        nn.init.uniform_(layer.self_attn.k_norm.weight, 0.5, 2)
    model.save_pretrained(folder)
    engine = engine_on(folder)
    assert engine.status.path == "packed"
    assert len(blocks_of(engine)) == 2
