"""How is pydantic's view of a wrong value told to a client: message, param and code?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

LONGEST_PARAM = 128

_EXPECTED = {
    "string": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "dict": "an object",
    "model": "an object",
    "model_attributes": "an object",
    "list": "an array",
    "tuple": "an array",
    "object": "an object",
    "content": "a string or an array of text parts",
    "input": "a string or an array of messages",
}

# What JSON calls them.
_WORDS = {"dictionary ": "object ", "list ": "array ", " after validation": ""}


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one parameter of a request."""

    message: str
    param: str | None
    code: str


def first_fault(
    error: ValidationError | RequestValidationError, *, given: object, skip: int = 0
) -> Fault:
    """The fault a client should hear of: of a union's branches, the one that came furthest.

    `given` is what the client wrote, in which the fault's place is looked up; `skip` leading words
    of that place are the framework's own.
    """
    details = error.errors()
    first = details[0]["loc"][: skip + 1]
    same = [detail for detail in details if detail["loc"][: skip + 1] == first]
    paths = [_path(detail["loc"][skip:], given) for detail in same]
    furthest = max(range(len(same)), key=lambda index: len(paths[index]))
    return _fault(same[furthest], paths[furthest])


def _fault(detail: Mapping[str, Any], path: Sequence[int | str]) -> Fault:
    place = shortened(".".join(str(step) for step in path))
    param, kind = place or None, str(detail["type"])
    if kind == "missing":
        return Fault(f"Missing required parameter: '{place}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return Fault(f"Unknown parameter: '{place}'.", param, "unknown_parameter")
    if kind == "unsupported_parameter":
        message = f"Unsupported parameter: '{place}' is not supported with this model."
        return Fault(message, param, kind)
    if kind.endswith(("_type", "_parsing")):
        stem = kind.removesuffix("_type").removesuffix("_parsing")
        expected = _EXPECTED.get(stem, stem.replace("_", " "))
        where = f" for '{place}'" if place else " for the request body"
        got = a_kind(detail.get("input"))
        message = f"Invalid type{where}: expected {expected}, but got {got} instead."
        return Fault(message, param, "invalid_type")
    reason = str(detail["msg"]).removeprefix("Value error, ")
    if kind == "string_unicode":
        reason = "not valid Unicode"
    reason = reason[:1].lower() + reason[1:]
    for ours, theirs in _WORDS.items():
        reason = reason.replace(ours, theirs)
    return Fault(f"Invalid value for '{place}': {reason}.", param, "invalid_value")


def shortened(place: str) -> str:
    """`place`, cut where it is longer than a message should be."""
    return place if len(place) <= LONGEST_PARAM else place[:LONGEST_PARAM] + "…"


def a_kind(value: object) -> str:
    """What a JSON value is, as a message says it: "an integer", "null"."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case _:
            return "an object"


def _path(location: tuple[int | str, ...], given: object) -> list[int | str]:
    """The steps of `location` that the client wrote; the last one may be what is missing.

    Pydantic's locations also name branches of unions and validators: those are left out.
    """
    if location[-1:] == ("[key]",):
        # A key itself is at fault: named is what holds it.
        location = location[:-2]
    path: list[int | str] = []
    here = given
    for position, step in enumerate(location):
        last = position == len(location) - 1
        if isinstance(here, Mapping) and (step in here or last):
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
        else:
            continue
        path.append(step)
    return path
