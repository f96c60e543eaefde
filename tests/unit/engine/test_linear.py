"""Are prepacked linear layers the model's own, only faster?"""

import copy

import pytest
import torch
import transformers
from torch.nn import GELU, Linear, Module, Sequential

from engine.model import linear
from engine.model.linear import PrepackedLinear, prepack_

SHAPES = [(384, 1536), (1536, 384), (32, 64), (7, 5), (1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_it_computes_what_torchs_own_computes(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(1)
    own = Linear(*shape, bias=bias)
    rows = torch.randn(2, 9, shape[0])
    torch.testing.assert_close(PrepackedLinear(own)(rows), own(rows), rtol=1e-4, atol=1e-5)
    activated = PrepackedLinear(own, gelu=True)(rows)
    torch.testing.assert_close(activated, GELU()(own(rows)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("gelu", [True, False])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(
    shape: tuple[int, int], gelu: bool
) -> None:
    torch.manual_seed(1)
    layer = PrepackedLinear(Linear(*shape), gelu=gelu)
    rows = torch.randn(700, shape[0])
    everything = layer(rows)
    for count in [*range(16, 160, 16), 512, 688]:
        assert torch.equal(layer(rows[:count]), everything[:count]), count
        assert torch.equal(layer(rows[-count:]), everything[-count:]), count


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@torch.inference_mode()
def test_a_whole_model_stays_what_it_was(activation: str) -> None:
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act=activation,
    )
    torch.manual_seed(1)
    plain = transformers.BertModel(config).eval()
    fast = copy.deepcopy(plain)
    prepack_(fast)
    ids = torch.randint(99, (3, 20))
    expected = plain(ids).last_hidden_state
    torch.testing.assert_close(fast(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    assert not any(type(module) is Linear for module in fast.modules())
    assert sum(module.gelu for module in layers(fast)) == (2 if activation == "gelu" else 0)


def layers(model: Module) -> list[PrepackedLinear]:
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def test_only_plain_float32_layers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Linear):
        """Not torch's linear layer, whatever it computes."""

    model = Sequential(Own(8, 8), Linear(8, 8).bfloat16(), Linear(8, 8))
    prepack_(model)
    assert [type(module) for module in model] == [Own, Linear, PrepackedLinear]

    monkeypatch.setattr(linear, "can_prepack", lambda: False)
    plain = Sequential(Linear(8, 8))
    prepack_(plain)
    assert type(plain[0]) is Linear
