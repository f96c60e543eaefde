"""Which token ids does a request line's body ask for, and how are they to be run?

The one place that turns bodies into engine requests: the plan counts by it, the drain runs by it.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never
from uuid import UUID

from engine.errors import TemplateError
from engine.request import EncodeRequest, GenerateRequest, Request, Sampling
from engine.surface import TokenizerLike
from service.bodies import check
from service.bodies.chat import ChatBody
from service.bodies.check import Generating, InvalidBody, Rules
from service.bodies.completions import CompletionBody
from service.bodies.responses import ResponsesBody
from service.catalog import Model
from service.faults import Fault
from service.lines import SUBJECTS
from worker import readings
from worker.readings import Embed, Encode


@dataclass(frozen=True, slots=True)
class Generate:
    """A chat, completions or responses line: `choices` answers to each prompt."""

    body: Generating
    sequences: tuple[tuple[int, ...], ...]
    sampling: Sampling
    choices: int


Prompt = Encode | Generate


def read(
    body: Mapping[str, Any],
    *,
    endpoint: str,
    model: Model,
    tokenizer: TokenizerLike,
    rules: Rules,
    line_seed: int = 0,
) -> Prompt:
    """The body checked and tokenised. Raises InvalidBody: the line's 400."""
    prompts: tuple[tuple[int, ...], ...]
    checked = check.body(body, endpoint=endpoint, rules=rules, kind=model.kind)
    match checked:
        case ChatBody():
            turns = [Turn(each.role, each.text, each.name) for each in checked.messages]
            prompts = (_rendered(turns, tokenizer, "messages"),)
        case ResponsesBody():
            turns = [Turn(each.role, each.text) for each in checked.input]
            if checked.instructions is not None:
                turns.insert(0, Turn("system", checked.instructions))
            prompts = (_rendered(turns, tokenizer, "input"),)
        case CompletionBody():
            prompts = tuple(
                tuple(tokenizer.encode_prompt(item) if isinstance(item, str) else item)
                for item in checked.prompt
            )
        case _:
            return readings.read(checked, model=model, tokenizer=tokenizer)
    return Generate(checked, prompts, _sampling(checked, model, line_seed), _choices(checked))


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, whichever endpoint it came by."""

    role: str
    text: str
    name: str | None = None


def _rendered(turns: Sequence[Turn], tokenizer: TokenizerLike, subject: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode_rendered(tokenizer.render_chat([_told(t) for t in turns])))
    except TemplateError as error:
        fault = Fault(
            f"The model's chat template refused the messages: {error}", subject, "invalid_value"
        )
        raise InvalidBody(fault) from error


def _told(turn: Turn) -> dict[str, Any]:
    # "developer" is the reference's newer name for a system message; templates know the old one.
    told = {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text}
    return told if turn.name is None else {**told, "name": turn.name}


def _choices(body: Generating) -> int:
    return 1 if isinstance(body, ResponsesBody) else body.n or 1


def _sampling(body: Generating, model: Model, line_seed: int) -> Sampling:
    given = None if isinstance(body, ResponsesBody) else body
    return Sampling(
        max_tokens=limit_of(body)[1] or model.default_max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        seed=line_seed if given is None or given.seed is None else given.seed,
        stop=() if given is None else tuple(given.stop or ()),
    )


def limit_of(body: Generating) -> tuple[str, int | None]:
    """The parameter that limits the answer, by the name that the client used, and its value."""
    match body:
        case ResponsesBody():
            return "max_output_tokens", body.max_output_tokens
        case ChatBody() if body.max_completion_tokens is not None:
            return "max_completion_tokens", body.max_completion_tokens
        case ChatBody() | CompletionBody():
            return "max_tokens", body.max_tokens
        case unreachable:
            assert_never(unreachable)


def param_of(prompt: Prompt, named: str | None, *, position: int) -> str | None:
    """What the engine names, by the client's name: it knows one limit, one input, no messages."""
    match prompt:
        case Generate() if named == "max_tokens":
            return limit_of(prompt.body)[0]
        case Generate() if named is None:
            return SUBJECTS[check.ENDPOINTS[type(prompt.body)]][0][0]
        case Generate():
            return named
        case _:
            return prompt.param(position) if named in (None, "input") else named


def seed_of(batch_id: UUID, line: int) -> int:
    """The seed of a line that names none: a retry draws the same numbers, a twin draws others."""
    digest = hashlib.blake2b(batch_id.bytes + line.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def requests(prompt: Prompt, *, key: Hashable) -> list[Request]:
    """One engine request a sequence and choice; ids are (key, position)."""
    match prompt:
        case Generate():
            return [
                GenerateRequest(
                    id=(key, position * prompt.choices + choice),
                    prompt=tokens,
                    sampling=prompt.sampling,
                    choice=choice,
                )
                for position, tokens in enumerate(prompt.sequences)
                for choice in range(prompt.choices)
            ]
        case _:
            dimensions = prompt.body.dimensions if isinstance(prompt, Embed) else None
            return [
                EncodeRequest((key, position), each.tokens, each.first, dimensions)
                for position, each in enumerate(prompt.readings)
            ]
