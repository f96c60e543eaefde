"""May this request run at all? Everything a client can cure is found here, before the model."""

import math
from collections.abc import Sequence
from typing import assert_never

from engine.config import Kind
from engine.request import EncodeRequest, Failure, FailureReason, GenerateRequest, Request, Sampling


def refusal(
    request: Request,
    *,
    kind: Kind,
    context_length: int,
    vocab_size: int,
    dimensions: Sequence[int] = (),
) -> Failure | None:
    """Why the request cannot run, or None; `dimensions` are the lengths its vectors may have."""
    match request:
        case EncodeRequest():
            return _refuse_encode(request, kind, context_length, vocab_size, dimensions)
        case GenerateRequest():
            return _refuse_generate(request, kind, context_length, vocab_size)
        case unreachable:
            assert_never(unreachable)


def _refuse_encode(
    request: EncodeRequest,
    kind: Kind,
    context_length: int,
    vocab_size: int,
    dimensions: Sequence[int],
) -> Failure | None:
    if kind is Kind.GENERATE:
        return _invalid(request, "This model generates text and encodes none.", None)
    length = len(request.tokens)
    if length > context_length:
        return _too_long(request, context_length, f"the input has {length} tokens", "input")
    return (
        _refuse_tokens(request, request.tokens, vocab_size, "input")
        or _refuse_first(request, kind)
        or _refuse_dimensions(request, dimensions)
    )


def _refuse_first(request: EncodeRequest, kind: Kind) -> Failure | None:
    if request.first is None:
        return None
    if kind not in (Kind.CLASSIFY, Kind.SCORE):
        return _invalid(request, "This model reads single texts, not pairs.", "input")
    if not 0 <= request.first <= len(request.tokens):
        message = (
            f"The first text of a pair cannot have {request.first} of {len(request.tokens)} tokens."
        )
        return _invalid(request, message, "input")
    return None


def _refuse_dimensions(request: EncodeRequest, dimensions: Sequence[int]) -> Failure | None:
    if request.dimensions is None or request.dimensions in dimensions:
        return None
    if not dimensions:
        return _invalid(request, "This model makes no vectors.", "dimensions")
    *others, last = map(str, dimensions)
    sizes = f"{', '.join(others)} or {last}" if others else last
    message = (
        f"Invalid value for 'dimensions': this model makes vectors of {sizes} dimensions, "
        f"not of {request.dimensions}."
    )
    return _invalid(request, message, "dimensions")


def _refuse_generate(
    request: GenerateRequest, kind: Kind, context_length: int, vocab_size: int
) -> Failure | None:
    if kind is not Kind.GENERATE:
        return _invalid(request, "This model does not generate text.", None)
    length, more = len(request.prompt), request.sampling.max_tokens
    if length >= context_length:
        return _too_long(request, context_length, f"the input has {length} tokens", None)
    if more > context_length - length:
        found = (
            f"{length + more} tokens were requested ({length} in the input, {more} as max_tokens)"
        )
        return _too_long(request, context_length, found, "max_tokens")
    return (
        _refuse_sampling(request, request.sampling)
        or _refuse_token_ids(request, request.sampling, vocab_size)
        or _refuse_tokens(request, request.prompt, vocab_size, None)
    )


def _refuse_sampling(request: Request, sampling: Sampling) -> Failure | None:
    if sampling.max_tokens < 1:
        return _invalid(request, "max_tokens must be at least 1.", "max_tokens")
    if not 0 <= sampling.temperature < math.inf:
        return _invalid(request, "temperature must be a number from 0.", "temperature")
    for name, share in (("top_p", sampling.top_p), ("min_p", sampling.min_p)):
        if not 0 <= share <= 1:
            return _invalid(request, f"{name} must be a number from 0 to 1.", name)
    if sampling.top_k < 0:
        return _invalid(request, "top_k must be at least 1, or 0 for all tokens.", "top_k")
    if not 0 < sampling.repetition_penalty < math.inf:
        message = "repetition_penalty must be a number above 0."
        return _invalid(request, message, "repetition_penalty")
    for name in ("frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            return _invalid(request, f"{name} must be a number.", name)
    if "" in sampling.stop:
        return _invalid(request, "A stop string must not be empty.", "stop")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        message = f"min_tokens must be from 0 to max_tokens, which is {sampling.max_tokens}."
        return _invalid(request, message, "min_tokens")
    if sampling.min_tokens and sampling.grammar is not None:
        message = "min_tokens cannot be kept where a grammar says when the answer ends."
        return _invalid(request, message, "min_tokens")
    if min(sampling.logprobs or 0, sampling.prompt_logprobs or 0) < 0:
        return _invalid(request, "logprobs must be at least 0.", "logprobs")
    return None


def _refuse_token_ids(request: Request, sampling: Sampling, vocab_size: int) -> Failure | None:
    biased = [token for token, _ in sampling.logit_bias]
    if len(set(biased)) < len(biased):
        return _invalid(request, "logit_bias names a token twice.", "logit_bias")
    if not all(math.isfinite(by) for _, by in sampling.logit_bias):
        return _invalid(request, "A logit_bias must be a number.", "logit_bias")
    for name, tokens in (("logit_bias", biased), ("candidates", sampling.candidates)):
        if not all(0 <= token < vocab_size for token in tokens):
            message = f"Token ids of this model run from 0 to {vocab_size - 1}."
            return _invalid(request, message, name)
    return None


def _refuse_tokens(
    request: Request, tokens: tuple[int, ...], vocab_size: int, param: str | None
) -> Failure | None:
    if not tokens:
        return _invalid(request, "The input must not be empty.", param)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return _invalid(request, f"Token ids of this model run from 0 to {vocab_size - 1}.", param)
    return None


def _too_long(request: Request, limit: int, found: str, param: str | None) -> Failure:
    message = f"This model's maximum context length is {limit} tokens, but {found}."
    return Failure(request.id, FailureReason.TOO_LONG, message, param)


def _invalid(request: Request, message: str, param: str | None) -> Failure:
    return Failure(request.id, FailureReason.INVALID, message, param)
