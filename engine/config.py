"""What does an engine need to know before it starts?"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What a model is used for."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105 no secret


class Quantize(StrEnum):
    """What a model's linear layers are rounded to when it is loaded; FP8 on CUDA devices alone."""

    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One model on one device.

    `device` "auto" takes a CUDA device where there is one. `dtype` is a name of torch's (float32,
    bfloat16, float16). `context_length` None means the model's own; a larger one is refused.
    `pooling` is for embedding models whose own files do not say how they pool: mean, cls, max …;
    their vectors are normalised. `dimensions` are the shorter lengths their vectors may be cut to,
    beside those that the model's own files list. `quantize` rounds the weights of the linear layers
    once, and their inputs row by row.

    `deterministic` asks that a result be the same to the bit whatever is computed beside it and
    however it is cut into steps: models that are found not to do it are refused. Encoders that run
    packed do it anyway; decoders do it on a CPU, and more slowly.

    Three limits bound a step, in tokens with padding: `token_budget` a batch of texts or prompts,
    `prefill_tokens` the piece of a prompt batch computed in one step (so that an abort need not
    wait for a long prompt), `cache_tokens` prompts and answers whose keys and values are held. A
    single sequence always runs, however long. `max_rows` bounds batches that are padded; where
    sequences come and go one by one, a step takes as many tokens as `prefill_tokens` says, and at
    most `max_sequences` run at once.

    `guess_rows` is up to how many tokens a step is filled with guesses at what answers go on with:
    where it has so few, one more costs a CPU little. 0: no guesses, as on a CUDA device.

    `memory_bytes` is the most that a batch of texts may take beside the weights; None means what is
    free on a CUDA device, and no limit on a CPU. There it also bounds keys and values, which take
    what is free whatever `cache_tokens` says. `cuda_graphs` captures packs of a CUDA device by
    shape, and steps that make one token of each sequence by their number, and replays them, which
    may help small models; it has not been tried yet.
    """

    model: Path
    kind: Kind
    device: str = "cpu"
    dtype: str = "float32"
    context_length: int | None = None
    token_budget: int = 4096
    max_rows: int = 64
    max_sequences: int = 128
    guess_rows: int = 16
    prefill_tokens: int = 1024
    cache_tokens: int = 32768
    threads: int | None = None
    pooling: str | None = None
    dimensions: tuple[int, ...] = ()
    quantize: Quantize | None = None
    deterministic: bool = False
    memory_bytes: int | None = None
    cuda_graphs: bool = False
