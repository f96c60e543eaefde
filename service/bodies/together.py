"""Do the parameters of a generating body, each right by itself, go together?"""

from collections.abc import Iterator

from service.bodies.chat import ChatBody, Message
from service.bodies.completions import CompletionBody
from service.bodies.formats import ResponseFormat, TextFormat
from service.bodies.parameters import Sequenced
from service.bodies.responses import ResponsesBody
from service.bodies.tools import NamedTool
from service.faults import Fault


def fault_of(body: ChatBody | CompletionBody | ResponsesBody) -> Fault | None:
    """The first that does not, if any."""
    return next(_faults(body), None)


def _faults(body: ChatBody | CompletionBody | ResponsesBody) -> Iterator[Fault]:
    match body:
        case ChatBody():
            for place, message in enumerate(body.messages):
                yield from _turn(message, f"messages.{place}")
            yield from _format(body.response_format, "response_format")
            yield from _tools(body)
            if body.top_logprobs and not body.logprobs:
                yield _invalid("top_logprobs", "it needs 'logprobs' to be true")
            yield from _one_form(body, _forms_of_chat(body))
        case CompletionBody():
            if 1 < (body.best_of or 1) < (body.n or 1):
                yield _invalid("best_of", "it must not be less than 'n'")
            yield from _one_form(body, [])
        case ResponsesBody():
            if body.text is not None:
                yield from _format(body.text.format, "text.format")


def _turn(message: Message, place: str) -> Iterator[Fault]:
    if message.tool_calls and message.role != "assistant":
        yield _invalid(f"{place}.tool_calls", "only the assistant calls tools")
    if message.content is None and not message.tool_calls:
        yield _missing(f"{place}.content")
    if message.role == "tool" and message.tool_call_id is None:
        yield _missing(f"{place}.tool_call_id")
    if message.role != "tool" and message.tool_call_id is not None:
        yield _invalid(f"{place}.tool_call_id", "only a turn of the role tool answers a call")


def _format(asked: ResponseFormat | TextFormat | None, place: str) -> Iterator[Fault]:
    match asked:
        case ResponseFormat(type="json_schema", json_schema=None):
            yield _missing(f"{place}.json_schema")
        case TextFormat(type="json_schema", schema_=None):
            yield _missing(f"{place}.schema")
        case _:
            pass


def _tools(body: ChatBody) -> Iterator[Fault]:
    names = [tool.function.name for tool in body.tools or []]
    if len(set(names)) < len(names):
        yield _invalid("tools", "a function's name stands twice")
    match body.tool_choice:
        case "required" if not names:
            yield _invalid("tool_choice", "it needs 'tools'")
        case NamedTool(function=function) if function.name not in names:
            yield _invalid("tool_choice.function.name", "no function of 'tools' has this name")
        case _:
            pass


def _forms_of_chat(body: ChatBody) -> list[str]:
    """What else says how the whole answer is written."""
    forms = []
    if body.response_format is not None and body.response_format.type != "text":
        forms.append("response_format")
    if body.tools and body.tool_choice != "none":
        forms.append("tools")
    return forms


def _one_form(body: Sequenced, others: list[str]) -> Iterator[Fault]:
    own = [name for name in ("choice", "regex", "grammar") if getattr(body, name) is not None]
    given = [*others, *own]
    if len(given) > 1:
        yield _invalid(given[1], f"it cannot be combined with '{given[0]}'")


def _invalid(place: str, reason: str) -> Fault:
    return Fault(f"Invalid value for '{place}': {reason}.", place, "invalid_value")


def _missing(place: str) -> Fault:
    return Fault(f"Missing required parameter: '{place}'.", place, "missing_required_parameter")
