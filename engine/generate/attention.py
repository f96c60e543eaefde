"""How does a packed step attend, every row to its own text and no other?

A model that is told to use `CONTINUOUS` calls `attend` with queries, keys and values after their
rotation. Not every model hands keywords on to its layers, so what a step needs waits with them: in
one object that all the model's modules know.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from engine.generate.cpu_kernels import read_rows
from engine.generate.kv import KV, LayerKV
from engine.generate.layout import Chunk, Layout, Span
from engine.generate.rule import Rule, rule_of

CONTINUOUS = "halfrate_continuous"  # our name among transformers' attention functions

_LOWEST = -1e30  # below every score, yet finite: rows that see nothing must not become NaN


@dataclass(slots=True)
class Carrier:
    """What attention layers find while a step runs."""

    layout: Any = None  # of the kind that the attention function in use reads
    kv: KV | None = None


def carry(model: Any) -> Carrier:  # noqa: ANN401 a PreTrainedModel
    """Give all modules of a model one carrier."""
    carrier = Carrier()
    for module in model.modules():
        module.halfrate_carrier = carrier
    return carrier


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What rows have read so far: the mean of values, and the log of its weight."""

    values: Tensor  # float32 [rows, kv heads, queries a kv head, dim]
    weights: Tensor  # float32 [rows, kv heads, queries a kv head]

    def put(self, rows: slice, values: Tensor, weights: Tensor) -> None:
        """The first that these rows read."""
        self.values[rows] = values
        self.weights[rows] = weights

    def merge(self, rows: slice | Tensor, values: Tensor, weights: Tensor) -> None:
        """Something more that these rows read."""
        before, values = self.weights[rows], values.float()
        share = torch.sigmoid(weights - before).unsqueeze(-1)
        if isinstance(rows, slice):
            self.values[rows].lerp_(values, share)
        else:
            self.values[rows] = torch.lerp(self.values[rows], values, share)
        self.weights[rows] = torch.logaddexp(before, weights)


def attend(
    module: Any,  # noqa: ANN401 the attention layer that calls
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401 as the model hands them on
) -> tuple[Tensor, None]:
    """query: [1, heads, rows, dim]; key, value: [1, kv heads, rows, dim]. → [1, rows, heads, dim].

    Raises NotSupportedError where the model asks for what is not done here.
    """
    rule = rule_of(module, query, attention_mask, scaling, options)
    layout, kv = module.halfrate_carrier.layout, module.halfrate_carrier.kv
    layer: LayerKV = kv.layers[layout.calls]
    layout.calls += 1
    heads = layer.heads.count
    rows = query.shape[2]
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    new_key, new_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer.write(
        layout.cells(heads),
        new_key[: layout.known].flatten(0, 1),
        new_value[: layout.known].flatten(0, 1),
    )
    queries = query[0].transpose(0, 1).reshape(rows, heads, -1, query.shape[-1])
    shape = (*queries.shape[:3], value.shape[-1])
    sums = _Sums(torch.empty(shape), torch.empty(shape[:3]))
    read_rows(queries[: layout.short], layer, layout.reads, rule, (sums.values, sums.weights))
    sums.values[layout.known :] = 0
    for chunk in layout.chunks:
        _read_chunk(queries, new_key, new_value, chunk, rule, sums)
    for span in layout.spans:
        _read_span(queries, layer, layout, span, rule, sums)
    if rule.sinks is not None:
        share = torch.sigmoid(sums.weights - rule.sinks.view(heads, -1))
        sums.values.mul_(share.unsqueeze(-1))
    return sums.values.view(1, rows, query.shape[1], -1).to(dtype), None


def register() -> None:
    """Make `CONTINUOUS` known to transformers; once or often."""
    AttentionInterface.register(CONTINUOUS, attend)


def _read_chunk(
    queries: Tensor, key: Tensor, value: Tensor, chunk: Chunk, rule: Rule, sums: _Sums
) -> None:
    """Rows of one text over themselves; key, value: [rows, kv heads, dim]."""
    rows = slice(chunk.start, chunk.end)
    asking, keys, values = queries[rows].permute(1, 2, 0, 3), key[rows], value[rows]
    count = chunk.end - chunk.start
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if flash_does(rule, keys, values) and not _hides(rule.window, count):
        read, weights = flash(asking, keys[:, None], values[:, None], rule, causal=True)
    else:
        places = torch.arange(count)
        seen = _seen(places, places, rule.window)
        read, weights = _masked(asking, keys, values, seen, rule)
    sums.put(rows, read.permute(2, 0, 1, 3), weights.permute(2, 0, 1))


def _read_span(
    queries: Tensor, layer: LayerKV, layout: Layout, span: Span, rule: Rule, sums: _Sums
) -> None:
    """Rows over keys before all of them."""
    keys, values = layer.span(span.slot, span.begin, span.end)
    asking = queries[span.rows].permute(1, 2, 0, 3)
    seen = None
    if rule.window is not None and layout.last - span.position >= rule.window:
        places = torch.arange(span.position, span.position + span.end - span.begin)
        seen = _seen(layout.positions[span.rows], places, rule.window)
    if seen is None and flash_does(rule, keys, values):
        read, weights = flash(asking, keys[:, None], values[:, None], rule)
    else:
        read, weights = _masked(asking, keys, values, seen, rule)
    sums.merge(span.rows, read.permute(2, 0, 1, 3), weights.permute(2, 0, 1))


def _hides(window: int | None, length: int) -> bool:
    return window is not None and length > window


def _seen(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which keys a row sees, by position: bool [rows, keys]."""
    distance = rows[:, None] - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def flash_does(rule: Rule, keys: Tensor, values: Tensor) -> bool:
    """Whether torch's kernel for CPUs can do it."""
    return rule.softcap is None and keys.shape[-1] == values.shape[-1]


def flash(
    asking: Tensor,
    keys: Tensor,
    values: Tensor,
    rule: Rule,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's kernel for CPUs. All [batch, heads, rows or keys, dim], heads of the keys being as
    many as those of the queries, or one. → as asking, and float32 without dim."""
    read, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        asking, keys, values, 0.0, causal, attn_mask=mask, scale=rule.scale
    )
    return read, weights


def _masked(
    asking: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """The same with any mask, softcap and dims. seen: bool [rows, keys]."""
    heads, each, rows, _ = asking.shape
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).repeat(each, 1)
    read, weights = written_out(asking.flatten(1, 2), keys, values, mask, rule)
    return read.view(heads, each, rows, -1), weights.view(heads, each, rows)


def written_out(
    asking: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """asking: [batch, rows, dim]; keys, values: [batch, keys, dim]; mask is added to scores."""
    turned = keys.transpose(1, 2)
    if rule.softcap is None and mask is not None and asking.dtype == mask.dtype:
        scores = torch.baddbmm(mask, asking, turned, alpha=rule.scale)
    else:
        scores = torch.bmm(asking, turned).float().mul_(rule.scale)
        if rule.softcap is not None:
            scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if mask is not None:
            scores += mask
    top = scores.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST)
    scores = scores.sub_(top).exp_()
    total = scores.sum(dim=-1, keepdim=True)
    read = torch.bmm(scores.to(values.dtype), values) / total.clamp(min=1e-30).to(values.dtype)
    return read, (top + total.log()).squeeze(-1)
