"""Can a decoder be run by continuous batching, and are its scores the same?

Its own forward says what each layer keeps of a token; then a few random texts that share a
beginning go through the real schedule, in pieces, and are compared with its own forward, and with
themselves alone where they must be the same to the bit.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.config import Quantize
from engine.generate.attention import CONTINUOUS, register
from engine.generate.block import Heard, form_blocks_, is_layer, products
from engine.generate.forward import PackedForward
from engine.generate.kv import KV, Heads
from engine.generate.layout import lay_out_exactly
from engine.generate.row_bytes import check_products
from engine.generate.rule import IGNORED, NotSupportedError
from engine.generate.span_forward import SPANS, SpanForward, register_spans
from engine.memory import is_out_of_memory
from engine.model.linear import prepack_
from engine.model.load import Decoder, speed_up
from engine.plan.schedule import Asked, Schedule
from engine.plan.slots import Slots

log = logging.getLogger(__name__)

_LISTENING = "halfrate_listening"

_SHARED, _OWN, _MORE = 20, (3, 9, 14, 1), 4  # tokens of the texts that are compared
_BUDGET = 16  # of a step: prompts come in pieces, beside others' next tokens

# Greatest difference of scores, as a share of the greatest score; a wrong read makes it near 1.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
_ROUNDED = 0.3  # int8

# Ropes that turn every token by what the longest text beside it needs.
_JOINT_ROPES = {"dynamic", "longrope"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# What a model may raise where it is not made for being run so.
_REFUSALS = (
    NotSupportedError, TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError,
)  # fmt: skip


_Way = Callable[[Decoder, KV], PackedForward | SpanForward]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer asked of attention."""

    queries: int  # heads
    heads: Heads
    options: dict[str, Any]


def continuous_forward(
    decoder: Decoder,
    tokens: int,
    quantize: Quantize | None = None,
    room: Callable[[Sequence[Heads]], int] | None = None,
    *,
    deterministic: bool = False,
) -> tuple[PackedForward | SpanForward, int] | None:
    """The decoder over a KV memory for a text of its context and for `tokens` tokens at least.

    Or for as many tokens as there is `room` for, given what layers keep of each. Also the memory's
    size. None, and the reason in the log, where its scores would not be right; or, if they are to
    be `deterministic`, not the same to the bit in any company. The model's layers are replaced by
    faster ones; after None it is not to be used any more.
    """
    try:
        kind, attention = _way(decoder.device, deterministic=deterministic)
        texts: dict[Hashable, tuple[int, ...]] = dict(enumerate(_texts(decoder)))
        expected = {name: _own_scores(decoder, text) for name, text in texts.items()}
        heads, formed = _listen(decoder, quantize)
        if formed < len(heads):
            speed_up(decoder.model, quantize)
        prepack_(decoder.model)  # what stands outside of the layers
        register()
        register_spans()
        decoder.model.set_attn_implementation(attention)
        _compare(decoder, kind, heads, texts, expected, _tolerance(decoder, quantize))
        if deterministic:
            _check_bytes(decoder, kind, heads, texts)
        sizes = (max(tokens, decoder.context_length), tokens) if room is None else (room(heads),)
        return _with_memory(decoder, kind, heads, sizes)
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise
        reason = str(error) or type(error).__name__
    log.warning("padded batches: continuous batching does not suit the model: %s", reason)
    return None


def _way(device: torch.device, *, deterministic: bool) -> tuple[_Way, str]:
    """The forward for this device, and its attention's name."""
    match device.type:
        case "cpu" if deterministic:
            return partial(PackedForward, layout=lay_out_exactly), CONTINUOUS
        case _ if deterministic:
            msg = (
                "answers that are the same to the bit in any company, on another device than a CPU"
            )
            raise NotSupportedError(msg)
        case "cpu":
            return PackedForward, CONTINUOUS
        case "cuda":
            return SpanForward, SPANS
        case _:
            msg = f"there is no attention for the device {device.type}"
            raise NotSupportedError(msg)


def _listen(decoder: Decoder, quantize: Quantize | None) -> tuple[list[Heads], int]:
    """What each layer keeps of a token, and how many layers became blocks.

    Raises NotSupportedError where attention is the model's own.
    """
    config = decoder.model.config.get_text_config()
    _check_ropes(config.to_dict())
    kinds = getattr(config, "layer_types", None) or []
    if getattr(config, "attention_chunk_size", None) or not _LAYER_TYPES.issuperset(kinds):
        msg = "layers that attend in chunks, or not at all"
        raise NotSupportedError(msg)
    calls: list[_Call] = []
    layers: dict[nn.Module, Heard] = {}

    def hear(
        _module: Any,  # noqa: ANN401 the attention layer that calls
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        **options: Any,  # noqa: ANN401 as the model hands them on
    ) -> tuple[Tensor, None]:
        """Note shapes; attend simply, so that what is answered depends on all of it."""
        calls.append(
            _Call(query.shape[1], Heads(key.shape[1], key.shape[-1], value.shape[-1]), options)
        )
        read = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=True
        )
        return read.transpose(1, 2), None

    def note(
        layer: nn.Module, hidden: tuple[Any, ...], keywords: dict[str, Any], made: object
    ) -> None:
        if isinstance(made, Tensor) and len(hidden) == 1:
            call = calls[-1]
            heads = (call.queries, call.heads.count, call.heads.key_dim)
            options = {n: value for n, value in call.options.items() if n not in IGNORED}
            layers[layer] = Heard(hidden[0], keywords, options, heads, made)

    AttentionInterface.register(_LISTENING, hear)
    decoder.model.set_attn_implementation(_LISTENING)
    ids = torch.tensor([_texts(decoder)[0]], device=decoder.device)
    positions = torch.arange(ids.shape[1], device=decoder.device)[None]
    hooks = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in decoder.model.modules()
        if is_layer(module)
    ]
    decoder.model(input_ids=ids, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    if len(calls) != config.num_hidden_layers:
        msg = f"{len(calls)} of {config.num_hidden_layers} layers call the attention interface"
        raise NotSupportedError(msg)
    windows = sum(call.options.get("sliding_window") is not None for call in calls)
    if kinds and windows != sum(kind == "sliding_attention" for kind in kinds):
        msg = "layers with a window that do not name it"
        raise NotSupportedError(msg)
    on_cpu = decoder.device.type == "cpu"
    product = products(quantize, decoder.model.dtype) if on_cpu else None
    formed = 0 if product is None else form_blocks_(decoder.model, layers, product)
    return [call.heads for call in calls], formed


def _check_ropes(config: Any) -> None:  # noqa: ANN401 a config's dict, or any part of it
    if isinstance(config, dict):
        if config.get("rope_type") in _JOINT_ROPES:
            msg = f"positions of the {config['rope_type']} kind, which neighbours would change"
            raise NotSupportedError(msg)
        for part in config.values():
            _check_ropes(part)


def _compare(
    decoder: Decoder,
    kind: _Way,
    heads: Sequence[Heads],
    texts: dict[Hashable, tuple[int, ...]],
    expected: dict[Hashable, Tensor],
    tolerance: float,
) -> None:
    """Raises NotSupportedError where scores differ from those of the model as it was loaded."""
    for name, place, found in _scores(decoder, kind, heads, texts, _BUDGET):
        _check(found, expected[name][place], tolerance)


def _check_bytes(
    decoder: Decoder, kind: _Way, heads: Sequence[Heads], texts: dict[Hashable, tuple[int, ...]]
) -> None:
    """Raises NotSupportedError where a text's scores are not the same in any company."""
    check_products(decoder.model, decoder.vocab_size)
    together = list(_scores(decoder, kind, heads, texts, _BUDGET))
    at_once = list(_scores(decoder, kind, heads, texts, _BUDGET * _BUDGET))
    alone = [
        each
        for name, text in texts.items()
        for each in _scores(decoder, kind, heads, {name: text}, _BUDGET * _BUDGET)
    ]
    known = {(name, place): found for name, place, found in together}
    if any(not torch.equal(known[name, place], found) for name, place, found in at_once + alone):
        msg = "scores that other texts change in the last bits"
        raise NotSupportedError(msg)


def _scores(
    decoder: Decoder,
    kind: _Way,
    heads: Sequence[Heads],
    texts: dict[Hashable, tuple[int, ...]],
    budget: int,
) -> Iterator[tuple[Hashable, int, Tensor]]:
    """Scores [vocab] after the last tokens of each text, as steps of this budget make them.

    With the text's name, and the last token's place in it.
    """
    slots = Slots(sum(map(len, texts.values())) * 4)
    schedule = Schedule(slots, limit=slots.total, max_rows=len(texts))
    forward = kind(decoder, KV(slots.total, heads, _dtype(decoder), decoder.device))
    schedule.add(Asked(name, text[:-_MORE], _MORE + 1) for name, text in texts.items())
    while (step := schedule.plan(budget)).pieces:
        sequences, scores = forward(step)
        schedule.done(step)
        for sequence, found in zip(sequences, scores, strict=True):
            yield sequence.id, sequence.known - 1, found
            if sequence.more == 1:
                schedule.finish(sequence)
            else:
                schedule.append(sequence, texts[sequence.id][sequence.known])


def _tolerance(decoder: Decoder, quantize: Quantize | None) -> float:
    return _ROUNDED if quantize is not None else _TOLERANCES[decoder.model.dtype]


def _check(found: Tensor, expected: Tensor, limit: float) -> None:
    """Both [vocab]."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    if not difference <= limit:
        msg = f"scores differ by {difference:.1e} of the greatest"
        raise NotSupportedError(msg)


def _texts(decoder: Decoder) -> list[tuple[int, ...]]:
    """Random texts that begin alike, short enough for any context."""
    generator = torch.Generator().manual_seed(11)

    def draw(count: int) -> tuple[int, ...]:
        ids = torch.randint(0, decoder.vocab_size, (count,), generator=generator)
        return tuple(ids.tolist())

    shared = draw(_SHARED)
    return [shared[: decoder.context_length // 2] + draw(own + _MORE) for own in _OWN]


def _own_scores(decoder: Decoder, text: tuple[int, ...]) -> Tensor:
    """[tokens, vocab], as the model computes them alone."""
    ids = torch.tensor([text], device=decoder.device)
    options = {"position_ids": torch.arange(len(text), device=decoder.device)[None]}
    if "position_ids" not in decoder.accepts:
        options = {}
    output = decoder.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **options
    )
    scores: Tensor = output.logits[0]
    return scores


def _dtype(decoder: Decoder) -> torch.dtype:
    """Of keys and values: a CPU attends in float32, whatever else the model computes in."""
    return torch.float32 if decoder.device.type == "cpu" else decoder.model.dtype


def _with_memory(
    decoder: Decoder,
    kind: _Way,
    heads: Sequence[Heads],
    sizes: Sequence[int],
) -> tuple[PackedForward | SpanForward, int]:
    """With room for the first of these numbers of tokens that there is memory for."""
    for tokens in sizes:
        total = Slots(tokens).total
        try:
            kv = KV(total, heads, _dtype(decoder), decoder.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or tokens == sizes[-1]:
                raise
        else:
            return kind(decoder, kv), total
    raise AssertionError  # the last one was made, or has raised
