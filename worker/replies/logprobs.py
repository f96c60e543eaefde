"""How are the log probabilities of an answer's tokens told to the client?

Of the tokens whose text is in the answer: neither the one that ended it nor what a stop string cut.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from engine.request import Generation, TokenLogprob
from engine.surface import TokenizerLike

Told = TypeVar("Told", bound=int | TokenLogprob)

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
        for told, _ in _placed(answer.text, answer.logprobs, tokenizer)
    ]
    return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands before its answer: its text, its first token and what is told of the
    others. With `special`, the names of special tokens are in the text."""

    text: str
    told: tuple[int | TokenLogprob, ...]
    special: bool


_NOTHING = Echo("", (), special=False)


def of_completion(
    answer: Generation, tokenizer: TokenizerLike, echo: Echo = _NOTHING
) -> dict[str, Any] | None:
    """The reference's `Logprobs` of completions; offsets count characters.

    Of an echoed prompt's first token nothing is known, as nothing stands before it.
    """
    if answer.logprobs is None:
        return None
    prompt = _placed(echo.text, echo.told, tokenizer, special=echo.special)
    made = _placed(answer.text, answer.logprobs, tokenizer)
    written = [*prompt, *((told, len(echo.text) + offset) for told, offset in made)]
    return {
        "tokens": [_text(_token(told), tokenizer) for told, _ in written],
        "token_logprobs": [
            None if isinstance(told, int) else _number(told.logprob) for told, _ in written
        ],
        "top_logprobs": [
            None
            if isinstance(told, int)
            else {_text(token, tokenizer): _number(each) for token, each in told.top}
            for told, _ in written
        ],
        "text_offset": [offset for _, offset in written],
    }


def _token(told: int | TokenLogprob) -> int:
    return told if isinstance(told, int) else told.token


def _placed(
    text: str, told: Sequence[Told], tokenizer: TokenizerLike, *, special: bool = False
) -> list[tuple[Told, int]]:
    """Each token that is in the text, and at which character it begins."""
    ends = list(accumulate(len(character.encode()) for character in text))
    place = 0  # counts bytes, since a token may be a part of a character
    found = []
    for each in told:
        if not ends or place >= ends[-1]:
            break
        found.append((each, bisect_right(ends, place)))
        # What is left out of a text, as a special token is, takes no place in it.
        token = _token(each)
        if special or tokenizer.decode([token]):
            place += len(tokenizer.token_bytes(token))
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
