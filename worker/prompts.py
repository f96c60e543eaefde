"""Which token ids does a request line's body ask for, and how are they to be run?

The one place that turns bodies into engine requests: the plan counts by it, the drain runs by it.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from engine.errors import TemplateError
from engine.generate.labels import Fork
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
from worker import calling, readings
from worker.labelling import Labels, labels_of
from worker.readings import Embed, Encode
from worker.sampling import Form, form_of, limit_of, sampling_of


@dataclass(frozen=True, slots=True)
class Generate:
    """A chat, completions or responses line: `choices` answers to each prompt, of which the
    `told` likeliest are told.

    `form` is what the whole answer is to be; with `labels`, they are scored and no answer written.
    """

    body: Generating
    sequences: tuple[tuple[int, ...], ...]
    sampling: Sampling
    choices: int
    tokenizer: TokenizerLike
    form: Form | None = None
    labels: Labels | None = None
    told: int | None = None  # all of them

    @property
    def requests_each(self) -> int:
        """How many requests of the engine a prompt takes."""
        return self.choices if self.labels is None else len(self.labels.tree.forks)


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
            tools = calling.offered(checked, tokenizer)
            turns = [Turn(each.role, each.text, calling.told(each)) for each in checked.messages]
            prompts = (_rendered(turns, tokenizer, "messages", tools),)
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
    form = form_of(checked, tokenizer)
    told, choices = _choices(checked)
    sampling = sampling_of(checked, model, line_seed, form)
    if told < choices and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    labels = labels_of(None if form is None else form.labels, sampling, tokenizer)
    return Generate(checked, prompts, sampling, choices, tokenizer, form, labels, told)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, whichever endpoint it came by; `more` is what a template may also want."""

    role: str
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)


def _rendered(
    turns: Sequence[Turn],
    tokenizer: TokenizerLike,
    subject: str,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[int, ...]:
    told = [_told(turn) for turn in turns]
    try:
        return tuple(tokenizer.encode_rendered(tokenizer.render_chat(told, tools=tools)))
    except TemplateError as error:
        fault = Fault(
            f"The model's chat template refused the messages: {error}", subject, "invalid_value"
        )
        raise InvalidBody(fault) from error


def _told(turn: Turn) -> dict[str, Any]:
    # "developer" is the reference's newer name for a system message; templates know the old one.
    role = "system" if turn.role == "developer" else turn.role
    return {"role": role, "content": turn.text, **turn.more}


def _choices(body: Generating) -> tuple[int, int]:
    """How many answers to each prompt are told, and how many are made."""
    if isinstance(body, ResponsesBody):
        return 1, 1
    told = body.n or 1
    return told, max(told, (body.best_of or 1) if isinstance(body, CompletionBody) else 1)


def param_of(prompt: Prompt, named: str | None, *, position: int) -> str | None:
    """What the engine names, by the client's name: it knows one limit, one input, no messages."""
    match prompt:
        case Generate() if named == "max_tokens":
            return limit_of(prompt.body)[0]
        case Generate() if named == "grammar" and prompt.form is not None:
            return prompt.form.param
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
        case Generate(labels=Labels() as labels):
            return [
                _of_fork((key, position * prompt.requests_each + place), tokens, labels, fork)
                for position, tokens in enumerate(prompt.sequences)
                for place, fork in enumerate(labels.tree.forks)
            ]
        case Generate():
            return [
                GenerateRequest(
                    id=(key, position * prompt.choices + choice),
                    prompt=tokens,
                    # Of a prompt's choices the first tells its log probabilities.
                    sampling=replace(prompt.sampling, prompt_logprobs=None)
                    if choice
                    else prompt.sampling,
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


def _of_fork(
    request_id: Hashable, prompt: tuple[int, ...], labels: Labels, fork: Fork
) -> GenerateRequest:
    """What comes first behind a fork's tokens, and how likely each of its candidates is to."""
    asked = Sampling(max_tokens=1, temperature=0.0, candidates=fork.candidates)
    return GenerateRequest(request_id, (*prompt, *labels.tree.stem, *fork.tokens), asked)
