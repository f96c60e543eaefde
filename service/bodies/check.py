"""Is the body of a request line one that can be run on its endpoint?

A fault here fails its line alone, with 400 in the error file. Nothing is ignored silently: a
parameter that the engine does not honour is refused unless it is harmless or at its neutral value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from service.bodies.chat import ChatBody
from service.bodies.completions import CompletionBody
from service.bodies.embeddings import EmbeddingsBody
from service.bodies.parameters import Body
from service.bodies.responses import ResponsesBody
from service.faults import Fault, first_fault, shortened
from service.settings import Limits, UnknownParameters

SHAPES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
}

PARAMETERS = frozenset(name for shape in SHAPES.values() for name in shape.model_fields)
"""Every name that some endpoint of the reference knows."""

ENDPOINTS = {shape: endpoint for endpoint, shape in SHAPES.items()}


class InvalidBody(Exception):
    """The line's 400: what is wrong with its body."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings say of bodies."""

    max_inputs: int
    unknown: UnknownParameters = UnknownParameters.ERROR

    @classmethod
    def of(cls, limits: Limits) -> "Rules":
        """Those of the settings."""
        return cls(limits.max_inputs, limits.unknown_parameters)


AnyBody = ChatBody | CompletionBody | EmbeddingsBody | ResponsesBody
Checked = TypeVar("Checked", bound=Body)


def body(given: Mapping[str, Any], *, endpoint: str, rules: Rules) -> AnyBody:
    """The checked body of a line of that endpoint. Raises InvalidBody."""
    match endpoint:
        case "/v1/chat/completions":
            return chat(given, rules)
        case "/v1/completions":
            return completion(given, rules)
        case "/v1/embeddings":
            return embeddings(given, rules)
        case "/v1/responses":
            return response(given, rules)
        case _:
            raise ValueError(endpoint)


def chat(given: Mapping[str, Any], rules: Rules) -> ChatBody:
    """The checked body of a chat line. Raises InvalidBody."""
    return _check(ChatBody, _known(ChatBody, given, rules), rules)


def completion(given: Mapping[str, Any], rules: Rules) -> CompletionBody:
    """The checked body of a completions line. Raises InvalidBody."""
    known = _known(CompletionBody, given, rules)
    return _check_listed(CompletionBody, known, "prompt", _listed(known, "prompt"), rules)


def embeddings(given: Mapping[str, Any], rules: Rules) -> EmbeddingsBody:
    """The checked body of an embeddings line. Raises InvalidBody."""
    known = _known(EmbeddingsBody, given, rules)
    inputs = _listed(known, "input")
    if len(inputs) > rules.max_inputs:
        message = (
            f"Invalid 'input': at most {rules.max_inputs} inputs a line are allowed, "
            f"but this one has {len(inputs)}."
        )
        raise InvalidBody(Fault(message, "input", "invalid_value"))
    return _check_listed(EmbeddingsBody, known, "input", inputs, rules)


def response(given: Mapping[str, Any], rules: Rules) -> ResponsesBody:
    """The checked body of a responses line. Raises InvalidBody."""
    known = _known(ResponsesBody, given, rules)
    if known.get("input") in ("", []):
        raise _empty("input")
    return _check(ResponsesBody, known, rules)


def _known(shape: type[Body], given: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """What has to be looked at: null is as absent. Raises InvalidBody for names of no parameter."""
    known: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in shape.model_fields:
            known[name] = value
        elif name in PARAMETERS:
            # Another endpoint's: to drop it would change an answer.
            message = f"Unsupported parameter: '{name}' is not a parameter of {ENDPOINTS[shape]}."
            raise InvalidBody(Fault(message, name, "unsupported_parameter"))
        elif rules.unknown is UnknownParameters.ERROR:
            param = shortened(name)
            raise InvalidBody(Fault(f"Unknown parameter: '{param}'.", param, "unknown_parameter"))
    return known


def _listed(given: Mapping[str, Any], name: str) -> list[Any]:
    """A text, texts, token ids or lists of token ids, as a list of texts or of lists of ids."""
    value = given.get(name)
    if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
        raise _empty(name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [value] if all(type(item) is int for item in value) else value
    message = f"Invalid type for '{name}': expected a string, or an array of strings or tokens."
    raise InvalidBody(Fault(message, name, "invalid_type"))


def _empty(name: str) -> InvalidBody:
    return InvalidBody(Fault(f"Invalid '{name}': it must not be empty.", name, "invalid_value"))


def _check_listed(
    shape: type[Checked], given: Mapping[str, Any], name: str, listed: list[Any], rules: Rules
) -> Checked:
    """A fault inside a value that was no list before is a fault of the whole value."""
    try:
        return _check(shape, {**given, name: listed}, rules)
    except InvalidBody as invalid:
        param = invalid.fault.param or ""
        if listed == given[name] or not param.startswith(f"{name}.0"):
            raise
        shown = name + param.removeprefix(f"{name}.0")
        message = invalid.fault.message.replace(f"'{param}'", f"'{shown}'")
        raise InvalidBody(Fault(message, shown, invalid.fault.code)) from None


def _check(shape: type[Checked], given: Mapping[str, Any], rules: Rules) -> Checked:
    # The rule on unknown names holds inside the body too, in its messages.
    extra: Literal["ignore", "forbid"] = (
        "ignore" if rules.unknown is UnknownParameters.IGNORE else "forbid"
    )
    try:
        return shape.model_validate(given, extra=extra)
    except ValidationError as error:
        raise InvalidBody(first_fault(error, given=given)) from None
