"""How many tokens' keys and values does a CUDA device have room for, beside what a step takes?"""

from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.generate.kv import Heads
from engine.memory import estimated
from engine.model.load import Decoder
from engine.plan.slots import slab_size

_SHARE = 0.9  # of what is free; the rest is for what the allocator leaves unused between blocks
_SCORES = 40  # bytes of a score: in the model's dtype, float32, and sorted in float64 to be drawn


def tokens_that_fit(decoder: Decoder, config: EngineConfig, layers: Sequence[Heads]) -> int:
    """Tokens of KV memory that may be taken now."""
    free, _ = torch.cuda.mem_get_info(decoder.device)
    # What the allocator holds and nobody uses is free to us as well.
    free += torch.cuda.memory_reserved(decoder.device)
    free -= torch.cuda.memory_allocated(decoder.device)
    most = free if config.memory_bytes is None else min(free, config.memory_bytes)
    step = bytes_of_a_step(decoder.model.config.get_text_config(), decoder.vocab_size, config)
    return tokens_within(int(most * _SHARE) - step, layers, decoder.model.dtype.itemsize)


def tokens_within(spare: int, layers: Sequence[Heads], itemsize: int) -> int:
    """Tokens of whole slabs whose keys and values take at most `spare` bytes; one slab at least."""
    token = sum(layer.count * (layer.key_dim + layer.value_dim) for layer in layers) * itemsize
    tokens = max(0, spare) // token
    slab = slab_size(tokens)
    return max(1, tokens // slab) * slab


def bytes_of_a_step(model: object, vocabulary: int, config: EngineConfig) -> int:
    """What the largest step takes beside keys and values, by the shapes of the model's config."""
    states = estimated(model, padded=False, most=None).needs(config.prefill_tokens, 0)
    scores = config.max_sequences * vocabulary * _SCORES
    return int(states) + scores
