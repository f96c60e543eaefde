"""Is the body of a request line one that can be run on its endpoint?

A fault here fails its line alone, with 400 in the error file. Nothing is ignored silently: a
parameter that the engine does not honour is refused unless it is harmless or at its neutral value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from service.bodies import together
from service.bodies.chat import ChatBody
from service.bodies.classify import OF_KINDS, ClassifyBody
from service.bodies.completions import CompletionBody
from service.bodies.embeddings import EmbeddingsBody
from service.bodies.moderations import ModerationBody
from service.bodies.parameters import Body
from service.bodies.responses import ResponsesBody
from service.bodies.score import RerankBody, ScoreBody
from service.catalog import ModelKind
from service.faults import Fault, first_fault, shortened
from service.lines import SUBJECTS
from service.settings import Limits, UnknownParameters

SHAPES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
    "/v1/classify": ClassifyBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/v1/moderations": ModerationBody,
}

PARAMETERS = frozenset(name for shape in SHAPES.values() for name in shape.model_fields)
"""Every name that some endpoint knows."""

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


Generating = ChatBody | CompletionBody | ResponsesBody
Encoding = EmbeddingsBody | ClassifyBody | ScoreBody | RerankBody | ModerationBody
AnyBody = Generating | Encoding
Checked = TypeVar("Checked", bound=Body)
Generated = TypeVar("Generated", ChatBody, CompletionBody, ResponsesBody)


def body(given: Mapping[str, Any], *, endpoint: str, rules: Rules, kind: ModelKind) -> AnyBody:
    """The checked body of a line of that endpoint, for a model of that kind. Raises InvalidBody."""
    match endpoint:
        case "/v1/chat/completions":
            return chat(given, rules)
        case "/v1/completions":
            return completion(given, rules)
        case "/v1/responses":
            return response(given, rules)
        case "/v1/embeddings":
            return embeddings(given, rules)
        case "/v1/classify":
            return classify(given, rules, kind)
        case "/v1/score":
            return score(given, rules)
        case "/v1/rerank":
            return rerank(given, rules)
        case "/v1/moderations":
            return moderation(given, rules)
        case _:
            raise ValueError(endpoint)


def chat(given: Mapping[str, Any], rules: Rules) -> ChatBody:
    """The checked body of a chat line. Raises InvalidBody."""
    return _together(_check(ChatBody, _known(ChatBody, given, rules), rules))


def completion(given: Mapping[str, Any], rules: Rules) -> CompletionBody:
    """The checked body of a completions line. Raises InvalidBody."""
    known = _known(CompletionBody, given, rules)
    listed = _listed(known, "prompt")
    return _together(_check_listed(CompletionBody, known, "prompt", listed, rules))


def response(given: Mapping[str, Any], rules: Rules) -> ResponsesBody:
    """The checked body of a responses line. Raises InvalidBody."""
    known = _known(ResponsesBody, given, rules)
    if known.get("input") in ("", []):
        raise _empty("input")
    return _together(_check(ResponsesBody, known, rules))


def embeddings(given: Mapping[str, Any], rules: Rules) -> EmbeddingsBody:
    """The checked body of an embeddings line. Raises InvalidBody."""
    known = _known(EmbeddingsBody, given, rules)
    inputs = _few(_listed(known, "input"), "input", rules)
    checked = _check_listed(EmbeddingsBody, known, "input", inputs, rules)
    _check_prompted(checked.prompt_name, checked.input)
    return checked


def classify(given: Mapping[str, Any], rules: Rules, kind: ModelKind) -> ClassifyBody:
    """The checked body of a classify line. Raises InvalidBody."""
    known = _known(ClassifyBody, given, rules)
    _check_honoured(known, kind)
    inputs = _few(_listed(known, "input"), "input", rules)
    if "labels" in known:
        _few(_texts(known, "labels"), "labels", rules)
    checked = _check_listed(ClassifyBody, known, "input", inputs, rules)
    if len(checked.labelled) > rules.max_inputs:
        message = (
            f"Invalid 'templates': at most {rules.max_inputs} labels in templates a line are "
            f"allowed, but these are {len(checked.labelled)}."
        )
        raise InvalidBody(Fault(message, "templates", "invalid_value"))
    _check_prompted(checked.prompt_name, checked.input)
    if kind is ModelKind.TOKEN_CLASSIFY and not isinstance(checked.input[0], str):
        message = "Invalid type for 'input': expected text, since spans are of characters."
        raise InvalidBody(Fault(message, "input", "invalid_type"))
    return checked


def score(given: Mapping[str, Any], rules: Rules) -> ScoreBody:
    """The checked body of a score line. Raises InvalidBody."""
    known = _known(ScoreBody, given, rules)
    sides = [_side(known, names) for names in SUBJECTS["/v1/score"]]
    first, second = (_few(_texts(known, name), name, rules) for name in sides)
    if len(first) not in (1, len(second)):
        message = (
            f"Invalid '{sides[1]}': it has {len(second)} texts for the {len(first)} of "
            f"'{sides[0]}'; expected as many, or one text in '{sides[0]}'."
        )
        raise InvalidBody(Fault(message, sides[1], "invalid_value"))
    return _check(ScoreBody, {**known, sides[0]: first, sides[1]: second}, rules)


def rerank(given: Mapping[str, Any], rules: Rules) -> RerankBody:
    """The checked body of a rerank line. Raises InvalidBody."""
    known = _known(RerankBody, given, rules)
    if known.get("query") == "":
        raise _empty("query")
    documents = known.get("documents")
    if isinstance(documents, list):
        if not documents or "" in documents:
            raise _empty("documents")
        _few(documents, "documents", rules)
    return _check(RerankBody, known, rules)


def moderation(given: Mapping[str, Any], rules: Rules) -> ModerationBody:
    """The checked body of a moderations line. Raises InvalidBody."""
    known = _known(ModerationBody, given, rules)
    texts = _few(_texts(known, "input"), "input", rules)
    return _check(ModerationBody, {**known, "input": texts}, rules)


def _together(checked: Generated) -> Generated:
    fault = together.fault_of(checked)
    if fault is not None:
        raise InvalidBody(fault)
    return checked


def _check_honoured(known: Mapping[str, Any], kind: ModelKind) -> None:
    """Raises InvalidBody for what a model of that kind cannot do, or needs."""
    for name, kinds in OF_KINDS.items():
        # Whether labels exclude each other is a question however it is answered; of the others
        # false asks for nothing.
        asked = name in known and (known[name] is not False or name == "multi_label")
        if asked and kind not in kinds:
            message = f"Unsupported parameter: '{name}' is not supported with this model."
            raise InvalidBody(Fault(message, name, "unsupported_parameter"))
    if kind is ModelKind.EMBED and "labels" not in known:
        message = "Missing required parameter: 'labels', which this model compares texts with."
        raise InvalidBody(Fault(message, "labels", "missing_required_parameter"))


def _check_prompted(prompt_name: str | None, inputs: list[str] | list[list[int]]) -> None:
    if prompt_name is not None and not isinstance(inputs[0], str):
        message = "Invalid value for 'prompt_name': a prompt goes before a text, not before tokens."
        raise InvalidBody(Fault(message, "prompt_name", "invalid_value"))


def _side(known: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The one of these names that the client wrote."""
    given = [name for name in names if name in known]
    if len(given) > 1:
        message = f"Invalid '{given[1]}': it means the same as '{given[0]}'; give one of them."
        raise InvalidBody(Fault(message, given[1], "invalid_value"))
    if not given:
        message = f"Missing required parameter: '{names[0]}'."
        raise InvalidBody(Fault(message, names[0], "missing_required_parameter"))
    return given[0]


def _few(listed: list[Any], name: str, rules: Rules) -> list[Any]:
    """The list, where it is not too long."""
    if len(listed) > rules.max_inputs:
        message = (
            f"Invalid '{name}': at most {rules.max_inputs} inputs a line are allowed, "
            f"but this one has {len(listed)}."
        )
        raise InvalidBody(Fault(message, name, "invalid_value"))
    return listed


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


def _texts(given: Mapping[str, Any], name: str) -> list[Any]:
    """A text or texts, as a list."""
    value = given.get(name)
    if value in ("", []) or (isinstance(value, list) and "" in value):
        raise _empty(name)
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    message = f"Invalid type for '{name}': expected a string or an array of strings."
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
