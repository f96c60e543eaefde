"""How is pydantic's view of a wrong value told to a client: message, param and code?"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_MISSING = "missing"
_FORBIDDEN = "extra_forbidden"
_TYPES = ("_type", "_parsing", "is_instance_of")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one parameter of a request."""

    message: str
    param: str | None
    code: str


def first_fault(error: ValidationError, *, given: object) -> Fault:
    """The fault a client should hear of: of a union's branches, the one that came furthest."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]["loc"][:1]
    same = [detail for detail in details if detail["loc"][:1] == first]
    return fault(max(same, key=lambda detail: len(_path(detail["loc"], given))), given=given)


def fault(detail: ErrorDetails, *, given: object) -> Fault:
    """One error of pydantic's as the client should read it."""
    path = _path(detail["loc"], given)
    param = ".".join(str(step) for step in path) or None
    kind = detail["type"]
    if kind == _MISSING:
        return Fault(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == _FORBIDDEN:
        return Fault(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    reason = detail["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    if kind.endswith(_TYPES):
        return Fault(f"Invalid type for '{param}': {reason}.", param, "invalid_type")
    return Fault(f"Invalid value for '{param}': {reason}.", param, "invalid_value")


def _path(location: tuple[int | str, ...], given: object) -> list[int | str]:
    """The steps of `location` that the client wrote; the last one may be what is missing.

    Pydantic's locations also name branches of unions and validators: those are left out.
    """
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
