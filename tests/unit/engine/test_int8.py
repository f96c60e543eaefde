"""Are int8 layers right, the same to the bit beside any neighbours, and only where they pay?"""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.model import int8
from engine.model.int8 import Int8Linear, has_fast_int8, quantize_
from engine.request import Embedding, EncodeRequest
from engine.tokenizer import Tokenizer

SHAPES = [(16, 16, True), (37, 50, True), (64, 192, False), (384, 384, True), (1536, 384, True)]
on_shapes = pytest.mark.parametrize(("inputs", "outputs", "bias"), SHAPES)


def reference(linear: nn.Linear, x: Tensor) -> Tensor:
    """The same roundings one after the other, in float64."""
    weight = linear.weight.detach().double()
    scale = weight.abs().amax(1, keepdim=True) / 127
    weight = (weight / scale).round() * scale
    rows = x.double()
    least = rows.amin(-1, keepdim=True).clamp(max=0)
    steps = (rows.amax(-1, keepdim=True).clamp(min=0) - least) / 254
    rows = (rows / steps).round() * steps
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    return rows @ weight.T + bias


def lopsided(rows: int, width: int) -> Tensor:
    """Rows of several magnitudes, most of their values above zero."""
    return (torch.randn(rows, width) + 0.7) * torch.logspace(-3, 3, rows).unsqueeze(1)


def layers(inputs: int, outputs: int, *, bias: bool) -> tuple[nn.Linear, Int8Linear]:
    """A random linear layer, and its int8 form."""
    torch.manual_seed(5)
    linear = nn.Linear(inputs, outputs, bias=bias)
    return linear, Int8Linear(linear)


@on_shapes
@torch.inference_mode()
def test_a_layer_computes_what_its_roundings_say(inputs: int, outputs: int, bias: bool) -> None:
    linear, rounded = layers(inputs, outputs, bias=bias)
    x = lopsided(40, inputs)

    found, expected, exact = rounded(x), reference(linear, x), linear(x)

    # Apart from the rare value that lies half way between two steps, only float32's own error.
    assert (found - expected).norm() <= 1e-2 * (exact - expected).norm()
    assert (found - exact).norm() <= 0.01 * exact.norm()


@on_shapes
@torch.inference_mode()
def test_neighbours_change_no_bit_of_a_row(inputs: int, outputs: int, bias: bool) -> None:
    _, rounded = layers(inputs, outputs, bias=bias)
    x = lopsided(1200, inputs)  # more than go through at once
    together = rounded(x)

    for count in (*range(1, 20), 31, 64, 1199):
        assert torch.equal(rounded(x[:count]), together[:count])
        assert torch.equal(rounded(x[-count:]), together[-count:])
    assert torch.equal(rounded(x.flip(0)).flip(0), together)
    assert torch.equal(rounded(x.view(3, 400, inputs)).view(1200, outputs), together)


@torch.inference_mode()
def test_rows_of_one_sign_and_of_zeros_are_right() -> None:
    linear, rounded = layers(64, 64, bias=True)
    x = torch.stack([torch.zeros(64), torch.ones(64), -torch.ones(64), torch.full((64,), 1e-30)])

    torch.testing.assert_close(rounded(x), linear(x), rtol=0, atol=0.02)
    assert torch.equal(rounded(x)[0], linear.bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@torch.inference_mode()
def test_what_is_not_finite_stays_so_and_harms_no_other_row(value: float) -> None:
    _, rounded = layers(64, 64, bias=True)
    x = torch.randn(3, 64)
    clean = rounded(x)
    x[1, 7] = value

    found = rounded(x)

    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"wide": nn.Linear(32, 64), "narrow": nn.Linear(32, 2)}) for _ in range(2)
        )
        self.head = nn.Linear(32, 32)


@pytest.fixture
def fast_chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """int8 layers everywhere: they are right, if slow, on any chip."""
    monkeypatch.setattr(int8, "has_fast_int8", lambda: True)
    return


@pytest.mark.usefixtures("fast_chip")
def test_only_the_wide_layers_of_blocks_are_rounded() -> None:
    model = Model()

    quantize_(model)

    rounded = {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    assert rounded == {"blocks.0.wide", "blocks.1.wide"}


def test_a_chip_without_fast_int8_keeps_its_floats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8, "has_fast_int8", lambda: False)
    model = Model()

    with caplog.at_level(logging.WARNING):
        quantize_(model)

    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert "stays as it is" in caplog.text


def test_vectors_of_the_real_model_stay_close_and_the_same_beside_any_neighbours(
    minilm: Path,
) -> None:
    words = ["archive", "tag", "embed", "batch", "night", "discount", "queue", "line", "ledger"]
    texts = [" ".join(words[n % 9 :] * (1 + n % 7)) + f" {n}" for n in range(48)]
    tokenizer = Tokenizer.from_dir(minilm)
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokenizer.encode(texts))]

    def vectors(engine: Engine, asked: list[EncodeRequest]) -> dict[object, np.ndarray]:
        results = [result for _, result in engine.run(asked)]
        return {result.id: result.vector for result in results if isinstance(result, Embedding)}

    config = EngineConfig(model=minilm, kind=Kind.EMBED)
    exact = vectors(Engine(config), requests)
    rounded = dataclasses.replace(config, quantize=Quantize.INT8)
    together, alone = vectors(Engine(rounded), requests), Engine(rounded)

    assert alone.status.path == "packed"
    assert alone.status.same_bytes

    assert min(float(exact[n] @ together[n]) for n in exact) > 0.99
    for request in requests[::12]:
        assert vectors(alone, [request])[request.id].tobytes() == together[request.id].tobytes()
    if has_fast_int8():
        assert any(not np.array_equal(exact[n], together[n]) for n in exact)
