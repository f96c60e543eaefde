"""What is asked of the engine, and what does it answer?

One request is one sequence: whoever has an array of inputs, or wants several choices of one prompt,
submits one request for each and joins the results.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer's tokens are chosen.

    `temperature` 0 takes the likeliest token. Draws are keyed by (seed, choice, step), so the same
    request draws the same numbers again, whatever runs beside it. `stop` strings end the answer and
    are not part of it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue a prompt of token ids; `choice` is the index among the choices of one prompt."""

    id: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    choice: int = 0


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Read a text's token ids, the model's special tokens included; what comes of it is the
    model's kind.

    `first` is how many of the tokens belong to the first text of a pair, its special tokens
    included; None for a single text. `dimensions` asks for a shorter vector of a model that was
    trained to be cut (Matryoshka).
    """

    id: Hashable
    tokens: tuple[int, ...]
    first: int | None = None
    dimensions: int | None = None


Request = GenerateRequest | EncodeRequest


@dataclass(frozen=True, slots=True)
class Work:
    """What one result cost.

    `computed_tokens` went through the model for it, padding and repeated work included: none for
    a twin of a text that was computed already. `seconds` is its share, by computed tokens, of the
    steps it ran in; `rows` how many sequences these held, in the harmonic mean.

    Of an answer: `first_token_s` from when its prompt was begun to its first token,
    `later_tokens_s` from then to its last; `preempted` says that it had to wait in the middle for
    memory.
    """

    computed_tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    first_token_s: float = 0.0
    later_tokens_s: float = 0.0
    preempted: bool = False


class FinishReason(StrEnum):
    """Why an answer ended: by itself or at a stop string, or at its token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids` holds every generated token, the closing one included."""

    id: Hashable
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    work: Work = Work()


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A vector, pooled and normalised as the model's own files say."""

    id: Hashable
    vector: NDArray[np.float32]  # [dims]
    input_tokens: int
    work: Work = Work()


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """How a text, or a pair of them, scores on each of the model's labels.

    `scores` are the logits under the activation that the model's own files ask for.
    """

    id: Hashable
    logits: NDArray[np.float32]  # [labels]
    scores: NDArray[np.float32]  # [labels]
    input_tokens: int
    work: Work = Work()


@dataclass(frozen=True, slots=True, eq=False)
class TokenClassification:
    """How each token of a text scores on each of the model's labels; softmax of its logits."""

    id: Hashable
    scores: NDArray[np.float32]  # [tokens, labels]
    input_tokens: int
    work: Work = Work()


class FailureReason(StrEnum):
    """What kept a request from an answer."""

    TOO_LONG = "too_long"
    INVALID = "invalid"
    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer. `message` is fit for the client; `param` names the request's field at fault."""

    id: Hashable
    reason: FailureReason
    message: str
    param: str | None = None


Encoded = Embedding | Classification | TokenClassification
Result = Generation | Encoded | Failure
