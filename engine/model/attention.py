"""How do sequences that lie end to end attend, each to itself? One call a run of equal length.

A model that is told to use `PACKED` calls `attend` with queries, keys and values of a whole pack,
after their rotation; how the pack is laid out travels in the keyword `pack` of the model's forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from engine.model.varlen import Bounds, suits
from engine.model.varlen import attend as attend_varlen

PACKED = "halfrate_packed"  # our name among transformers' attention functions

# Up to here float32 scores that are written out beat torch's flash kernel for CPUs. Microseconds a
# token and layer, 12 heads of 32, 2 threads, flash against written out: 1.75 and 0.8 at length 16,
# 2.0 and 1.2 at 48, 2.6 and 1.7 at 96, 3.0 and 2.8 at 192; equal at 256.
_SHORT = 192

# Most scores written out at once, in numbers: on a CPU what stays in its cache.
_MOST_SCORES = {"cpu": 1 << 18}
_MOST_SCORES_ELSEWHERE = 1 << 24

# What models hand on that says nothing about attention to one pack without a cache.
_IGNORED = frozenset(
    {
        "cache_position",
        "deterministic",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a pack that have the same length."""

    start: int  # its first token
    count: int  # sequences
    length: int  # tokens of each

    @property
    def end(self) -> int:
        """One behind its last token."""
        return self.start + self.count * self.length


def rows_of(tensor: Tensor, run: Run) -> Tensor:
    """A run's part of a pack, [tokens, …], as [count, length, …]; a view."""
    return tensor[run.start : run.end].view(run.count, run.length, *tensor.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """How sequences lie end to end. Rows behind the last run belong to nobody."""

    runs: tuple[Run, ...]
    bounds: Bounds | None  # the same for a CUDA kernel
    callers: list[Any]  # modules that have attended by it, as a probe wants to know

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Pack":
        """Sequences of these lengths, in order; equal ones should stand together."""
        runs = []
        start = 0
        for length, group in groupby(lengths):
            run = Run(start, sum(1 for _ in group), length)
            runs.append(run)
            start = run.end
        bounds = Bounds.of(lengths, device) if device.type == "cuda" else None
        return cls(tuple(runs), bounds, [])


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the model asks of attention."""

    scale: float
    causal: bool
    window: int | None  # a key at this distance or more is not seen
    softcap: float | None
    sinks: Tensor | None  # [heads]: a score each head may give to nothing
    bias: Tensor | None  # [1 or none, heads, tokens, tokens], added to scores

    def hides(self, length: int) -> bool:
        """Whether the window hides anything inside a sequence."""
        return self.window is not None and length > self.window

    def mask(self, run: Run, like: Tensor) -> Tensor | None:
        """What is added to scores: [length, length] or [heads, length, length]; None for naught."""
        mask = None
        if self.causal or self.hides(run.length):
            places = torch.arange(run.length, device=like.device)
            distance = places[:, None] - places
            hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
            if self.window is not None:
                hidden |= distance.abs() >= self.window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(hidden, float("-inf"))
        if self.bias is not None:
            # Biases follow from distances, so those of a run's first sequence are those of all.
            one = slice(run.start, run.start + run.length)
            bias = self.bias.flatten(0, -4)[..., one, one] if self.bias.dim() > 3 else self.bias
            mask = bias if mask is None else mask + bias
        return mask


def attend(
    module: Any,  # noqa: ANN401 the attention layer that calls
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack: Pack | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,  # noqa: ANN401 whatever a model hands on
) -> tuple[Tensor, None]:
    """transformers' attention function for packs. Raises ValueError for what it does not honour.

    Anything else that a model hands on and that is not None is refused, never ignored.

    query: [1, heads, tokens, dim]; key, value: [1, key heads, tokens, dim], heads a multiple of
    key heads. Returns [1, tokens, heads, dim of value]; rows of nobody come out as zeros, or by
    the varlen kernel as anything.
    """
    unknown = sorted(n for n, v in others.items() if v is not None and n not in _IGNORED)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if pack is None or unknown:
        msg = f"attention of a pack cannot honour {unknown}" if unknown else "no pack was handed on"
        raise ValueError(msg)
    pack.callers.append(module)
    rule = _Rule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        bias=position_bias,
    )
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # tokens first
    if (
        pack.bounds is not None
        and position_bias is None
        and suits(query.device, query.dtype, query.shape[-1], softcap, s_aux)
    ):
        whole = attend_varlen(
            query,
            key,
            value,
            pack.bounds,
            scale=rule.scale,
            causal=rule.causal,
            window=rule.window,
        )
        return whole.unsqueeze(0), None
    out = query.new_empty(1, query.shape[0], query.shape[1], value.shape[-1])
    for run in pack.runs:
        _attend_run(run, rule, query, key, value, out[0])
    out[0, pack.runs[-1].end :] = 0
    return out, None


AttentionInterface.register(PACKED, attend)


def _attend_run(
    run: Run, rule: _Rule, query: Tensor, key: Tensor, value: Tensor, out: Tensor
) -> None:
    """Write the run's rows of `out`. All are [tokens, heads, dim]."""
    q, k, v, target = (
        rows_of(t, run).transpose(1, 2) for t in (query, key, value, out)
    )  # views [count, heads, length, dim]
    written_out = rule.softcap is not None or rule.sinks is not None
    if run.length <= _SHORT and q.device.type == "cpu" and q.dtype == torch.float32:
        written_out = True
    if not written_out:
        plain_causal = rule.causal and not rule.hides(run.length) and rule.bias is None
        target.copy_(
            functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain_causal else rule.mask(run, q),
                is_causal=plain_causal,
                scale=rule.scale,
                enable_gqa=k.shape[1] != q.shape[1],
            )
        )
        return
    mask = rule.mask(run, q)
    most = _MOST_SCORES.get(q.device.type, _MOST_SCORES_ELSEWHERE)
    size = max(1, most // (q.shape[1] * run.length**2))
    for first in range(0, run.count, size):
        rows = slice(first, first + size)
        target[rows] = _by_scores(q[rows], k[rows], v[rows], mask, rule)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    """Softmax of scores written out. q: [count, heads, length, dim]; returns the same."""
    count, heads, length, _ = q.shape
    pairs = count * k.shape[1]  # heads that share a key head lie below each other as its queries
    scores = torch.baddbmm(
        q.new_empty(1),
        _by_pair(q, pairs),
        _by_pair(k, pairs).transpose(1, 2),
        beta=0,
        alpha=rule.scale,
    ).view(count, heads, length, length)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores += mask
    if rule.sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.float32)
    else:
        sinks = rule.sinks.to(scores).view(1, heads, 1, 1).expand(count, heads, length, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
    weights = weights.to(v.dtype).reshape(pairs, -1, length)
    mixed = torch.bmm(weights, _by_pair(v, pairs))
    return mixed.view(count, heads, length, v.shape[-1])


def _by_pair(tensor: Tensor, pairs: int) -> Tensor:
    """[count, heads, length, dim] as [pairs, …, dim], laid out alike however many there are.

    A single sequence would come as a view, with other strides, and for heads whose size is no
    multiple of four the products of views and of copies differ in the last bit.
    """
    return tensor.reshape(pairs, -1, tensor.shape[-1]).contiguous()
