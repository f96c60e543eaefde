"""Are products in eight bits, as a CUDA device makes them, near those of the float layer?"""

import logging

import pytest
import torch
from torch import nn

from engine.config import Quantize
from engine.model.load import speed_up
from engine.model.scaled import ScaledLinear, can_multiply, scale_

KINDS = list(Quantize)
CPU = torch.device("cpu")


def layer(bias: bool = True, inside: int = 64, out: int = 48) -> nn.Linear:
    torch.manual_seed(3)
    linear = nn.Linear(inside, out, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-2, 1, out)[:, None])  # channels of unlike sizes
    return linear


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": layer(), "odd": layer(inside=48, out=7)}) for _ in range(2)
        )
        self.head = layer()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_near_that_of_the_layer(
    kind: Quantize, bias: bool, dtype: torch.dtype
) -> None:
    linear = layer(bias)
    rows = (torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    with torch.inference_mode():
        found, exact = ScaledLinear(linear, kind)(rows), linear(rows.float())
    assert found.dtype == dtype
    assert found.shape == exact.shape
    # Of each row and channel, against what the two vectors could make at most.
    scale = rows.float().norm(dim=1)[:, None] * linear.weight.detach().norm(dim=1)[None] + 1
    limit = {Quantize.INT8: 0.005, Quantize.FP8: 0.02}[kind]
    assert float(((found.float() - exact).abs() / scale).max()) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_whatever_stands_beside_it(kind: Quantize) -> None:
    scaled = ScaledLinear(layer(), kind)
    rows = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    with torch.inference_mode():
        together = scaled(rows)
        for row in (0, 17, 39):
            assert torch.equal(scaled(rows[row : row + 1])[0], together[row])
        assert torch.equal(scaled(rows.view(2, 20, 64)).view(40, -1), together)
        assert torch.equal(scaled(torch.zeros(1, 64))[0], layer().bias)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_the_blocks_are_replaced_where_kernels_take_them(kind: Quantize) -> None:
    assert can_multiply(kind, CPU)
    model = Model()
    scale_(model, kind)
    for block in model.layers:
        assert isinstance(block, nn.ModuleDict)
        assert type(block["up"]) is ScaledLinear
        assert type(block["odd"]) is nn.Linear
    assert type(model.head) is nn.Linear


def test_a_device_that_does_not_multiply_such_numbers_keeps_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        msg = "torch._scaled_mm is only supported on CUDA devices with compute capability >= 8.9"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    model = Model()
    with caplog.at_level(logging.WARNING):
        scale_(model, Quantize.FP8)
    assert "fp8" in caplog.text
    assert not any(isinstance(module, ScaledLinear) for module in model.modules())


def test_fp8_leaves_a_model_on_a_cpu_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    rows = torch.randn(5, 64)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        before = model.head(rows)
        speed_up(model, Quantize.FP8)
        assert torch.allclose(model.head(rows), before, atol=1e-4)
    assert "CUDA" in caplog.text
