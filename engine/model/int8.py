"""How does a linear layer compute in int8, and which layers of a model do?

Weights are rounded once, with a scale for each output channel. Inputs are rounded as they come,
with a scale and a zero point for each row, so that a row's result depends on that row alone. Sums
are exact in int32; biases and activations come after them, in float32.
"""

import logging

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

# A rounded weight runs to ±127. A row is spread over 254 steps of the 255 there are: its zero is
# rounded too, and must not push its largest value over the end.
_WEIGHT_STEPS, _ROW_STEPS = 127, 254
# What oneDNN takes off a rounded input. It is unsigned, because for signed ones oneDNN has only its
# reference kernel, a thousand times slower; taking half the range off keeps the sums small.
_MIDDLE = 128
# Added to a float of less than 2^22 it leaves the nearest whole number in the low bits, in one pass
# where torch's round and its float → uint8 take eight times as long.
_ROUNDER = 1.5 * 2**23
_TINIEST = 1e-20  # a row of zeros has a scale too, and its inverse is finite
# Rows whose floats stay in the cache from one pass to the next: a quarter less time at 4,096 rows.
_AT_A_TIME = 512
_LEAST_FEATURES = 16  # a narrower layer costs more to round than it saves


def quantize_(model: nn.Module) -> None:
    """Replace the linear layers of the model's repeated blocks by int8 ones, in place.

    What stands outside of the blocks stays: embeddings and heads are little work, or decide much.
    All stays, with a warning, on a CUDA device and on a chip that multiplies int8 no faster than
    float32.
    """
    replaced = 0
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for parent in [module for block in blocks for module in block.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _is_worth_it(child):
                setattr(parent, name, Int8Linear(child))
                replaced += 1
    if not replaced:
        log.warning("nothing here runs faster in int8: the model stays as it is")


def has_fast_int8() -> bool:
    """Whether this CPU multiplies int8 with sums in int32 (AVX-512 VNNI)."""
    return torch.cpu._is_vnni_supported()  # torch has no public name for it


def _is_worth_it(layer: nn.Linear) -> bool:
    return (
        has_fast_int8()
        and layer.weight.device.type == "cpu"
        and min(layer.in_features, layer.out_features) >= _LEAST_FEATURES
    )


class Int8Linear(nn.Module):
    """In the place of an nn.Linear: x [..., in_features] to [..., out_features] of x's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()  # [out_features, in_features]
        self._scale = weight.abs().amax(dim=1).clamp_(min=_TINIEST).div_(_WEIGHT_STEPS)
        rounded = weight.div(self._scale.unsqueeze(1)).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        # What one step of a row's zero point adds to each output, before the row's scale.
        self._per_step = self._scale * rounded.sum(dim=1)
        bias = dict(linear.named_parameters()).get("bias")
        self._bias = torch.zeros(self.out_features) if bias is None else bias.detach().float()
        # A vector, not a number: of broadcast arguments torch's vector code takes one, not two.
        self._rounder = torch.full((self.in_features,), _ROUNDER)

    def forward(self, x: Tensor) -> Tensor:
        """Round the rows, multiply, scale back; some rows at a time, to stay in the cache."""
        rows = x.reshape(-1, self.in_features).float()
        made = torch.empty(len(rows), self.out_features)
        for start in range(0, len(rows), _AT_A_TIME):
            part = slice(start, start + _AT_A_TIME)
            self._compute(rows[part], made[part])
        return made.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _compute(self, rows: Tensor, out: Tensor) -> None:
        """rows: float32 [rows, in_features]; out: float32 [rows, out_features]."""
        # amax and amin are quicker than abs().amax(), and many times quicker than aminmax().
        least = rows.amin(1, keepdim=True).clamp_(max=0)
        scale = rows.amax(1, keepdim=True).clamp_(min=0).sub_(least)
        scale.clamp_(min=_TINIEST).div_(_ROW_STEPS)  # [rows, 1]
        steps = scale.reciprocal()
        zero = least.mul_(steps).neg_().round_()  # [rows, 1], 0 … 254
        rounded = torch.addcmul(self._rounder, rows, steps).view(torch.int32).to(torch.uint8)
        rounded += zero.to(torch.uint8)  # bytes wrap around: what was negative is right now
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _MIDDLE, self._weight, self._scale, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        torch.addcmul(self._bias, product, scale, out=out)
        out.addcmul_(self._per_step, scale.mul_(_MIDDLE - zero))
