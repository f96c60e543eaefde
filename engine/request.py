"""What is asked of the engine, and what does it answer?

One request is one sequence: whoever has an array of inputs, or wants several choices of one prompt,
submits one request for each and joins the results.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

JSON_SPACE = r" |\n[ \t]{0,20}"
"""Between the parts of a JSON text: a space, or a new line and how far it is indented. Were there
no end to it, some models would write nothing else."""


class GrammarKind(StrEnum):
    """In which language a grammar is written: a JSON schema, a regular expression, or Lark as
    llguidance reads it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to be a text of, from its first token to its last."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer's tokens are chosen.

    In this order the scores are changed: `repetition_penalty` divides or multiplies those of tokens
    in prompt and answer, `frequency_penalty` is taken off for each time a token stands in the
    answer and `presence_penalty` if it does, `logit_bias` is added; before `min_tokens` the answer
    cannot end, and what breaks the `grammar` cannot follow. Then `temperature` 0 takes the
    likeliest token; else one is drawn from the `top_k` likeliest (0: all), of those the fewest that
    reach `top_p`, of those the ones at least `min_p` times as likely as the likeliest.

    Draws are keyed by (seed, choice, step), so the same request draws the same numbers again,
    whatever runs beside it. `stop` strings end the answer and are not part of it; before
    `min_tokens` they do not. With `ignore_eos` a token that ends a text ends no answer.

    `logprobs` asks of each token for its log probability and those of so many likeliest, by the
    model's scores as they were; `prompt_logprobs` asks the same of each token of the prompt but the
    first, `candidates` for those of these tokens to come first.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    candidates: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


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
class TokenLogprob:
    """How likely a token was, and which were the likeliest: (token, log probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer. `token_ids` holds every generated token, the closing one included.

    `logprobs`, where asked for, are of all of them; `prompt_logprobs` of the prompt's tokens from
    the second on; `candidates` are the log probabilities of the request's candidates, in their
    order.
    """

    id: Hashable
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    work: Work = Work()
    logprobs: tuple[TokenLogprob, ...] | None = None
    candidates: tuple[float, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


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
