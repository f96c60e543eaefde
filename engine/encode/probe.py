"""Does this model run packed, and do neighbours then leave a text's numbers alone? Tried at load.

Some architectures have attention of their own and would go silently wrong in a pack; a few random
texts tell. What is found here decides the path and stands in the engine's status.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.encode.forward import Forward
from engine.encode.graphs import Captured
from engine.encode.packed import Packed
from engine.encode.padded import Padded
from engine.encode.texts import Text
from engine.memory import Limit, estimated, fitted, measured_on_cuda
from engine.model.attention import PACKED, Pack, rows_of
from engine.model.load import Encoder, speed_up
from engine.request import EncodeRequest

log = logging.getLogger(__name__)

_LENGTHS = (33, 17, 17, 9, 5, 2)
_SHARE = 0.9  # of the device's free memory that a batch may take
_LARGE = 1024  # tokens of the largest pack tried: loading a large model on a CPU should stay short
_LONGEST_WINDOW = 1024  # a text that fills a larger one would make loading slow

# Rotations that a long neighbour would change; padded batches hold texts of like length.
_BY_LONGEST = frozenset({"dynamic", "longrope"})

# How far packed and padded results may lie apart, beside twice what padding alone changes: a share
# of the largest number. Wrong attention or positions change a hundred times as much.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Found:
    """How a model is run."""

    forward: Forward
    same_bytes: bool
    limit: Limit


@torch.inference_mode()
def probe(encoder: Encoder, config: EngineConfig) -> Found:
    """Choose the path. The model is left set up for it, with faster linear layers."""
    texts = _texts(encoder)
    own = encoder.model.config._attn_implementation
    expected = [_padded(encoder, texts), [_padded(encoder, [text])[0] for text in texts]]
    try:
        reason = _plug_in(encoder, texts, expected)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        encoder.model.set_attn_implementation(own)
        log.warning(
            "this model cannot run packed; it runs in padded batches",
            extra={"architecture": type(encoder.model).__name__, "reason": reason},
        )
    # Only now: a value that lies half way between two steps of int8 goes up in a pack and down
    # beside padding, and would be taken for a pack gone wrong.
    speed_up(encoder.model, config.quantize)
    if reason is None:
        packed = Packed(encoder)
        same = _same_bytes(packed, texts, config.token_budget)
        limit = _limit(encoder, packed, config.memory_bytes)
        if config.cuda_graphs and encoder.device.type == "cuda":
            packed = Captured(encoder, budget=config.token_budget)
        return Found(packed, same, limit)
    padded = Padded(encoder, max_rows=config.max_rows)
    return Found(padded, same_bytes=False, limit=_limit(encoder, padded, config.memory_bytes))


def _texts(encoder: Encoder) -> list[Text]:
    """Random texts, one of them longer than the model's sliding window; longest first."""
    config = encoder.model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    lengths = set(_LENGTHS) if not window or window > _LONGEST_WINDOW else {*_LENGTHS, window + 9}
    fitting = sorted((min(n, encoder.context_length) for n in (*_LENGTHS, *lengths)), reverse=True)
    generator = np.random.default_rng(4)
    drawn = [generator.integers(0, encoder.vocab_size, size=length) for length in fitting]
    other = 0 if encoder.pad_id else 1  # the padding id inside a text would mean something else
    return [
        Text.of(EncodeRequest(n, tuple(other if t == encoder.pad_id else int(t) for t in ids)))
        for n, ids in enumerate(drawn)
    ]


def _padded(encoder: Encoder, texts: list[Text]) -> list[Tensor]:
    """Hidden states [tokens, width] of each, by the model's own attention."""
    longest = max(len(text.tokens) for text in texts)
    ids = torch.full((len(texts), longest), encoder.pad_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        mask[row, : len(text.tokens)] = 1
    hidden = encoder.hidden(
        input_ids=ids.to(encoder.device), attention_mask=mask.to(encoder.device)
    )
    return [row[: len(text.tokens)] for row, text in zip(hidden, texts, strict=True)]


def _plug_in(encoder: Encoder, texts: list[Text], expected: list[list[Tensor]]) -> str | None:
    """Tell the model to use our attention; why it does not work, or None."""
    if "position_ids" not in encoder.accepts:
        return "it takes no positions"
    if _rope_types(encoder) & _BY_LONGEST:
        return "its rotation depends on the longest text of a batch"
    encoder.model.set_attn_implementation(PACKED)
    pack = Pack.of([len(text.tokens) for text in texts], encoder.device)
    _, hidden = Packed(encoder).hidden(texts, pack)
    layers = encoder.model.config.get_text_config().num_hidden_layers
    if len(pack.callers) != layers:
        return f"{len(pack.callers)} of {layers} layers attend by transformers' attention interface"
    batched, alone = expected
    tolerance = _TOLERANCE[hidden.dtype] * max(float(row.abs().max()) for row in alone)
    noise = max(_distance(a, b) for a, b in zip(batched, alone, strict=True))
    found = [row for run in pack.runs for row in rows_of(hidden[0], run)]
    difference = max(_distance(a, b) for a, b in zip(found, alone, strict=True))
    if not difference <= tolerance + 2 * noise:
        return (
            f"packed results differ by {difference:.1e} where {tolerance + 2 * noise:.1e} would do"
        )
    return None


def _rope_types(encoder: Encoder) -> set[str]:
    """How the model rotates queries and keys, by all its kinds of layers."""
    stated = getattr(encoder.model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [stated, *(kind for kind in stated.values() if isinstance(kind, dict))]
    return {str(kind["rope_type"]) for kind in kinds if "rope_type" in kind}


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def _same_bytes(packed: Packed, texts: list[Text], token_budget: int) -> bool:
    """Whether each text comes out the same alone, among these, and in a large pack."""
    tokens = sum(len(text.tokens) for text in texts)
    times = max(2, min(token_budget, _LARGE) // tokens)
    many = sorted(texts * times, key=lambda t: len(t.tokens), reverse=True)
    among = {t.id: row for t, row in zip(texts, packed.rows(texts), strict=True)}
    full = {t.id: row for t, row in zip(many, packed.rows(many), strict=True)}
    return all(
        np.array_equal(among[text.id], other)
        for text in texts
        for other in (full[text.id], packed.rows([text])[0])
    )


def _limit(encoder: Encoder, forward: Forward, most: int | None) -> Limit:
    """What a batch may take, beside the weights that are there by now."""
    device = encoder.device
    if device.type != "cuda":
        config = encoder.model.config.get_text_config()
        return estimated(config, padded=forward.path == "padded", most=most)

    def run(count: int, length: int) -> None:
        drawn = np.random.default_rng(length).integers(2, encoder.vocab_size, (count, length))
        forward.rows([Text.of(EncodeRequest(0, tuple(map(int, ids)))) for ids in drawn])

    longest = min(encoder.context_length, 512)
    samples = measured_on_cuda(run, device, sorted({longest // 4 or 1, longest // 2 or 1, longest}))
    free, _ = torch.cuda.mem_get_info(device)
    return fitted(samples, int(free * _SHARE) if most is None else most)
