"""How does a Llama-like layer run with few passes over memory?

Most decoders' layers are alike: norm, attention, residual, norm, gated MLP, residual. Such a layer
is replaced by a `Block`: queries, keys and values by one product, rotation as one complex product,
activation, gate and residuals inside the products. Whether a layer is such a one is not read from
its class: the block must give what the layer gave, else the layer stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.config import Quantize
from engine.generate.cpu_kernels import rms_norm
from engine.model.int8 import Int8Linear, has_fast_int8
from engine.model.linear import PrepackedLinear, can_prepack

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """One call of a layer, and of attention inside it, as the model made them."""

    hidden: Tensor  # [1, rows, width]
    keywords: dict[str, Any]  # of the layer
    options: dict[str, Any]  # of the attention function
    heads: tuple[int, int, int]  # of queries, of keys and values, and their dim
    output: Tensor  # [1, rows, width]


def form_blocks_(
    model: nn.Module, heard: dict[nn.Module, Heard], product: Callable[[nn.Linear], "Product"]
) -> int:
    """Replace the layers that were heard where a block gives the same; how many were.

    The attention function that was heard must still be in use. A layer's own weights are let go.
    """
    turns = Turns()
    formed = 0
    for parent in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for place, layer in enumerate(parent):
            call = heard.get(layer)
            block = None if call is None else _block(layer, call, turns, product)
            if block is not None:
                parent[place] = block
                formed += 1
    return formed


def products(
    quantize: Quantize | None, dtype: torch.dtype
) -> Callable[[nn.Linear], "Product"] | None:
    """How layers multiply here; None where blocks would not be faster."""
    if dtype != torch.float32:
        return None
    match quantize:
        case Quantize.INT8:
            return Int8 if has_fast_int8() else None
        case Quantize.FP8 | None:
            return Prepacked if can_prepack() else None
        case unreachable:
            assert_never(unreachable)


def is_layer(module: nn.Module) -> bool:
    """Whether it may be of the form that blocks have."""
    if {name for name, _ in module.named_children()} != _PARTS:
        return False
    return all(
        type(getattr(getattr(module, part), name, None)) is nn.Linear
        for part, names in (("self_attn", _PROJECTIONS), ("mlp", _MLP))
        for name in names
    )


def _block(
    layer: nn.Module, heard: Heard, turns: "Turns", product: Callable[[nn.Linear], "Product"]
) -> "Block | None":
    """The layer as a block, or None where that would compute something else."""
    cos, _ = heard.keywords.get("position_embeddings") or (torch.empty(0), None)
    if cos.dim() != 3 or cos.shape[0] != 1 or cos.shape[-1] != heard.heads[2]:
        return None
    try:
        block = Block(layer, heard, turns, product)
    except AttributeError:  # its norms are of another kind
        return None
    found = block(heard.hidden, **heard.keywords)
    difference = (found - heard.output).abs().max() / heard.output.abs().max().clamp(min=1e-9)
    if not float(difference) <= TOLERANCES[product]:
        return None
    for part, names in ((layer.self_attn, _PROJECTIONS), (layer.mlp, _MLP)):
        for name in names:
            delattr(part, name)
    return block


class Product(Protocol):
    """A linear layer that can do something more with what it made, in the same pass."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: float32 [..., in] → [..., out]."""
        ...

    def swished(self, rows: Tensor) -> Tensor:
        """SiLU of it."""
        ...

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """It times `other` [..., out]."""
        ...

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """It plus `other` [..., out]."""
        ...


@dataclass(slots=True)
class Turns:
    """The rotation of every row of a step; all blocks have the same."""

    source: Any = None
    turns: Tensor | None = None

    def of(self, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """embeddings: cosines and sines, [1, rows, dim] → complex [rows, 1, dim / 2]."""
        if self.turns is None or self.source is not embeddings:
            cos, sin = (part[0, :, : part.shape[-1] // 2] for part in embeddings)
            self.source, self.turns = embeddings, torch.complex(cos, sin).unsqueeze(1)
        return self.turns


class Block(nn.Module):
    """A layer of the common form, over merged weights; float32 on a CPU."""

    def __init__(
        self,
        layer: Any,  # noqa: ANN401 a transformers layer, whose parts nn.Module does not declare
        heard: Heard,
        turns: Turns,
        product: Callable[[nn.Linear], Product],
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention  # attention functions are handed the module they work for
        self._options = heard.options
        self._turns = turns
        self._heads, self._kv_heads, self._dim = heard.heads
        self._norms = [_Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)]
        order = _interleaved(self._dim)
        self._head_norms = [
            _Norm(getattr(attention, name), order)
            for name in ("q_norm", "k_norm")
            if hasattr(attention, name)
        ]
        self._qkv = product(_merged(attention, order, heard.heads))
        self._o = product(attention.o_proj)
        self._gate, self._up, self._down = (product(getattr(mlp, name)) for name in _MLP)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> Tensor:
        """hidden_states: [1, rows, width] → the same."""
        before, after = self._norms
        rows = self._qkv(before(hidden_states))[0].view(
            -1, self._heads + 2 * self._kv_heads, self._dim
        )
        turned, value = torch.split(rows, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        if self._head_norms:
            parts = torch.split(turned, [self._heads, self._kv_heads], dim=1)
            pairs = zip(self._head_norms, parts, strict=True)
            turned = torch.cat([norm(part) for norm, part in pairs], dim=1)
        turned = _turn(turned, self._turns.of(position_embeddings))
        query, key = torch.split(turned, [self._heads, self._kv_heads], dim=1)
        attend = ALL_ATTENTION_FUNCTIONS[self._attention.config._attn_implementation]
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        read, _weights = attend(self._attention, query, key, value, None, **self._options)
        hidden = self._o.plus(read.flatten(2), hidden_states)
        rows = after(hidden)
        return self._down.plus(self._up.times(rows, self._gate.swished(rows)), hidden)


class _Norm:
    """RMSNorm over the last dim, whose numbers stand in this order if one is told."""

    def __init__(self, norm: Any, order: Tensor | None = None) -> None:  # noqa: ANN401 as above
        weight: Tensor = norm.weight.detach()
        self._weight = weight if order is None else weight[order]
        self._eps: float = norm.variance_epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self._weight, self._eps)


class Prepacked(PrepackedLinear):
    """By oneDNN, which does what comes next while a tile is at hand."""

    def swished(self, rows: Tensor) -> Tensor:
        """SiLU of what it makes."""
        made: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "swish", [], ""
        )
        return made

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Times `other`."""
        return self._with(rows, other, "mul")

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """Plus `other`."""
        return self._with(rows, other, "add")

    def _with(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, other, self._packed, self.bias, operation
        )
        return made


class Int8(Int8Linear):
    """Rounded weights; what comes next takes a pass of its own."""

    def swished(self, rows: Tensor) -> Tensor:
        """SiLU of what it makes."""
        return functional.silu(self(rows), inplace=True)

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Times `other`."""
        made: Tensor = self(rows)
        return made.mul_(other)

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """Plus `other`."""
        made: Tensor = self(rows)
        return made.add_(other)


# Greatest difference of a layer's output, as a share of the greatest value. Rounding makes 1e-6.
TOLERANCES: dict[Callable[[nn.Linear], Product], float] = {Prepacked: 1e-4, Int8: 0.1}


def _interleaved(dim: int) -> Tensor:
    """The order of a head's numbers that brings those that turn together side by side.

    A score is a sum over them, so it is the same in any order that queries and keys share.
    """
    return torch.arange(dim).view(2, -1).t().flatten()


def _turn(rows: Tensor, turns: Tensor) -> Tensor:
    """rows: [rows, heads, dim], pairs side by side; turns: complex [rows, 1, dim / 2]."""
    pairs = torch.view_as_complex(rows.view(*rows.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def _merged(
    attention: Any,  # noqa: ANN401 as above
    order: Tensor,
    heads: tuple[int, int, int],
) -> nn.Linear:
    """One layer for queries, keys and values; the heads of the first two in another order."""
    weights, biases = [], []
    for name, count in (("q_proj", heads[0]), ("k_proj", heads[1]), ("v_proj", 0)):
        linear = getattr(attention, name)
        rows = torch.arange(linear.out_features)
        if count:
            rows = (torch.arange(count)[:, None] * heads[2] + order).flatten()
        weights.append(linear.weight.detach()[rows])
        if linear.bias is not None:
            biases.append(linear.bias.detach()[rows])
    weight = torch.cat(weights)
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged
