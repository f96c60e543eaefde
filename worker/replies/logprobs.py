"""How are the log probabilities of an answer's tokens told to the client?

Of the tokens whose text is in the answer: neither the one that ended it nor what a stop string cut.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from engine.request import Generation, TokenLogprob
from engine.surface import TokenizerLike

_LEAST = -9999.0
"""As the reference tells a token that cannot come; JSON has no infinity."""


def of_chat(answer: Generation, tokenizer: TokenizerLike) -> dict[str, Any] | None:
    """The reference's `ChoiceLogprobs`; None where none were asked for."""
    if answer.logprobs is None:
        return None
    content = [
        {
            **_chat_token(told.token, told.logprob, tokenizer),
            "top_logprobs": [_chat_token(*each, tokenizer) for each in told.top],
        }
        for told, _ in _written(answer, answer.logprobs, tokenizer)
    ]
    return {"content": content, "refusal": None}


def of_completion(answer: Generation, tokenizer: TokenizerLike) -> dict[str, Any] | None:
    """The reference's `Logprobs` of completions; offsets count characters."""
    if answer.logprobs is None:
        return None
    written = _written(answer, answer.logprobs, tokenizer)
    return {
        "tokens": [_text(told.token, tokenizer) for told, _ in written],
        "token_logprobs": [_number(told.logprob) for told, _ in written],
        "top_logprobs": [
            {_text(token, tokenizer): _number(each) for token, each in told.top}
            for told, _ in written
        ],
        "text_offset": [offset for _, offset in written],
    }


def _written(
    answer: Generation, logprobs: Sequence[TokenLogprob], tokenizer: TokenizerLike
) -> list[tuple[TokenLogprob, int]]:
    """Each token that is in the text, and at which character it begins."""
    ends = list(accumulate(len(character.encode()) for character in answer.text))
    place = 0  # counts bytes, since a token may be a part of a character
    found = []
    for told in logprobs:
        if not ends or place >= ends[-1]:
            break
        found.append((told, bisect_right(ends, place)))
        # What is left out of a text, as a special token is, takes no place in it.
        if tokenizer.decode([told.token]):
            place += len(tokenizer.token_bytes(told.token))
    return found


def _chat_token(token: int, logprob: float, tokenizer: TokenizerLike) -> dict[str, Any]:
    return {
        "token": _text(token, tokenizer),
        "bytes": list(tokenizer.token_bytes(token)),
        "logprob": _number(logprob),
    }


def _text(token: int, tokenizer: TokenizerLike) -> str:
    return tokenizer.token_bytes(token).decode(errors="backslashreplace")


def _number(logprob: float) -> float:
    return max(_LEAST, logprob)
