"""How does a body ask for its answer's tokens to be chosen, and in what form?"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from engine.request import Grammar, GrammarKind, Sampling
from engine.surface import TokenizerLike
from service.bodies.chat import ChatBody
from service.bodies.check import Generating
from service.bodies.completions import CompletionBody
from service.bodies.parameters import Sequenced
from service.bodies.responses import ResponsesBody
from service.catalog import Model
from worker import calling


@dataclass(frozen=True, slots=True)
class Form:
    """What the whole answer has to be a text of, by which parameter `param` it says so.

    `labels` are all the texts that it may be, by their names, where they are few.
    """

    param: str
    grammar: Grammar
    labels: Mapping[str, str] | None = None


def form_of(body: Generating, tokenizer: TokenizerLike) -> Form | None:
    """None where the answer is free."""
    match body:
        case ResponsesBody():
            asked = None if body.text is None else body.text.format
            return None if asked is None else _of_schema(asked.schema_of_json, "text.format")
        case ChatBody() if body.tools and body.tool_choice != "none" and tokenizer.calls:
            return Form("tools", calling.grammar(body, body.tools, tokenizer.calls))
        case ChatBody() if body.response_format and body.response_format.type != "text":
            return _of_schema(body.response_format.schema_of_json, "response_format")
        case ChatBody() | CompletionBody():
            return _extra(body)
        case unreachable:
            assert_never(unreachable)


def _of_schema(schema: Mapping[str, Any] | None, param: str) -> Form | None:
    if schema is None:
        return None
    text = json.dumps(schema, ensure_ascii=False)
    return Form(param, Grammar(GrammarKind.JSON_SCHEMA, text), _enumerated(schema))


def _extra(body: Sequenced) -> Form | None:
    if body.choice is not None:
        options = " | ".join(json.dumps(label, ensure_ascii=False) for label in body.choice)
        grammar = Grammar(GrammarKind.LARK, f"start: {options}")
        return Form("choice", grammar, {label: label for label in body.choice})
    if body.regex is not None:
        return Form("regex", Grammar(GrammarKind.REGEX, body.regex))
    if body.grammar is not None:
        return Form("grammar", Grammar(GrammarKind.LARK, body.grammar))
    return None


def _enumerated(schema: Mapping[str, Any]) -> dict[str, str] | None:
    """The texts of a schema that is one enum of strings, or an object of one such property."""
    values = _enum(schema)
    if values is not None:
        return {value: json.dumps(value, ensure_ascii=False) for value in values}
    properties = schema.get("properties")
    plain = {"type", "properties", "required", "additionalProperties", "title", "description"}
    if not (
        schema.get("type") == "object"
        and isinstance(properties, dict)
        and len(properties) == 1
        and schema.get("additionalProperties") is False
        and schema.get("required") == list(properties)
        and plain.issuperset(schema)
    ):
        return None
    [(key, inner)] = properties.items()
    values = _enum(inner) if isinstance(inner, dict) else None
    if values is None:
        return None
    return {value: json.dumps({key: value}, ensure_ascii=False) for value in values}


def _enum(schema: Mapping[str, Any]) -> list[str] | None:
    values = schema.get("enum")
    if not {"type", "enum", "title", "description"}.issuperset(schema):
        return None
    if schema.get("type", "string") != "string" or not isinstance(values, list) or not values:
        return None
    return list(dict.fromkeys(values)) if all(isinstance(each, str) for each in values) else None


def sampling_of(body: Generating, model: Model, line_seed: int, form: Form | None) -> Sampling:
    """As the engine takes it. Where labels are to be chosen from, the likeliest is the default."""
    cold = form is not None and form.labels is not None
    temperature = (0.0 if cold else 1.0) if body.temperature is None else float(body.temperature)
    most = limit_of(body)[1] or model.default_max_tokens
    top_p = 1.0 if body.top_p is None else float(body.top_p)
    grammar = None if form is None else form.grammar
    if isinstance(body, ResponsesBody):
        return Sampling(most, temperature, top_p, seed=line_seed, grammar=grammar)
    return Sampling(
        max_tokens=most,
        temperature=temperature,
        top_p=top_p,
        seed=line_seed if body.seed is None else body.seed,
        stop=tuple(body.stop or ()),
        top_k=max(0, body.top_k or 0),
        min_p=float(body.min_p or 0),
        repetition_penalty=float(body.repetition_penalty or 1),
        frequency_penalty=float(body.frequency_penalty or 0),
        presence_penalty=float(body.presence_penalty or 0),
        logit_bias=tuple((int(token), float(by)) for token, by in (body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar,
        logprobs=_logprobs(body),
        prompt_logprobs=_logprobs(body) if isinstance(body, CompletionBody) and body.echo else None,
    )


def _logprobs(body: ChatBody | CompletionBody | Sequenced) -> int | None:
    match body:
        case ChatBody():
            return (body.top_logprobs or 0) if body.logprobs else None
        case CompletionBody():
            return body.logprobs
        case _:
            return None


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
