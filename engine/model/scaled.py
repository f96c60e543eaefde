"""How does a linear layer multiply in eight bits on a CUDA device? By torch's own two operators.

Weights are rounded once, with a scale for each output channel, and inputs as they come, with a
scale for each row, so that a row's result depends on that row alone: to int8 with exact sums in
int32 (`torch._int_mm`), or to float8 e4m3 with sums in float32 (`torch._scaled_mm`).

Neither has been run on a CUDA device yet; the same code is tested on a CPU, which has both
operators too.
"""

import logging
from typing import assert_never

import torch
from torch import Tensor, nn

from engine.config import Quantize

log = logging.getLogger(__name__)

_MOST = {Quantize.INT8: 127.0, Quantize.FP8: 448.0}  # the greatest rounded number
_TINIEST = 1e-12  # a row of zeros has a scale too
_MULTIPLE = 16  # of features, or the device's kernels do not take the layer
_FEWEST_ROWS = 32  # cuBLAS multiplies int8 from 17 rows on


def scale_(model: nn.Module, quantize: Quantize) -> None:
    """Replace the linear layers of the model's repeated blocks by rounded ones, in place.

    What stands outside of the blocks stays. All stays, with a warning, where the model's device
    does not multiply such numbers.
    """
    if not can_multiply(quantize, next(model.parameters()).device):
        log.warning("this device does not multiply in %s: the model stays as it is", quantize)
        return
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for parent in [module for block in blocks for module in block.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _fits(child):
                setattr(parent, name, ScaledLinear(child, quantize))


def can_multiply(quantize: Quantize, device: torch.device) -> bool:
    """Whether a product of such numbers comes out right there: found by trying one."""
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(64, 32)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(32, 64, generator=generator))
        linear.to(device)
        rows = torch.randn(3, 64, generator=generator).to(device)
        try:
            found = ScaledLinear(linear, quantize)(rows)
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        exact = linear(rows)
        return bool((found - exact).abs().max() < 0.1 * exact.abs().max())


def _fits(layer: nn.Linear) -> bool:
    return not layer.in_features % _MULTIPLE and not layer.out_features % _MULTIPLE


class ScaledLinear(nn.Module):
    """In the place of an nn.Linear: x [..., in_features] to [..., out_features] of x's dtype."""

    def __init__(self, linear: nn.Linear, quantize: Quantize) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._quantize = quantize
        bias = dict(linear.named_parameters()).get("bias")
        self._bias = None if bias is None else bias.detach().float()
        rounded, scale = self._rounded(linear.weight.detach())
        # No buffers: what makes a model float32 for a while would change them. Column by column, as
        # the kernels want the second factor.
        self._weight, self._scale = rounded.t(), scale.t()  # [in, out], [1, out]

    def forward(self, x: Tensor) -> Tensor:
        """Round the rows, multiply, scale back."""
        rows, scale = self._rounded(x.reshape(-1, self.in_features))
        made = self._product(rows, scale)
        if self._bias is not None:
            made = made + self._bias
        return made.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each row in eight bits, [rows, features], and its scale, float32 [rows, 1]."""
        rows = rows.float()
        most = _MOST[self._quantize]
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=_TINIEST) / most
        steps = (rows / scale).clamp(-most, most)
        match self._quantize:
            case Quantize.INT8:
                return steps.round().to(torch.int8), scale
            case Quantize.FP8:
                return steps.to(torch.float8_e4m3fn), scale
            case unreachable:
                assert_never(unreachable)

    def _product(self, rows: Tensor, scale: Tensor) -> Tensor:
        """float32 [rows, out_features]."""
        match self._quantize:
            case Quantize.INT8:
                count = len(rows)
                if count < _FEWEST_ROWS:
                    rows = nn.functional.pad(rows, (0, 0, 0, _FEWEST_ROWS - count))
                sums = torch._int_mm(rows, self._weight)[:count]
                return sums.float() * scale * self._scale
            case Quantize.FP8:
                # With a scale for each row the kernels give bfloat16.
                made: Tensor = torch._scaled_mm(
                    rows,
                    self._weight,
                    scale_a=scale,
                    scale_b=self._scale,
                    out_dtype=torch.bfloat16,
                )
                return made.float()
            case unreachable:
                assert_never(unreachable)
