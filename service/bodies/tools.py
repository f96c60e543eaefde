"""Which tools may a chat name, and how are they called?"""

from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, Field, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from service.bodies.formats import Name
from service.bodies.parameters import Object, Part, Text


class Function(Part):
    """What a model may call; its arguments keep to `parameters` whether it is `strict` or not."""

    name: Name
    description: StrictStr | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None


class Tool(Part):
    """One tool of a chat: a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """Which one is to be called."""

    name: Name


class NamedTool(Part):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


def _an_object(text: str) -> str:
    try:
        arguments = orjson.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise PydanticCustomError("arguments", "the arguments are not a JSON object")
    return text


class Call(Part):
    """What was called, and with what."""

    name: Text
    arguments: Annotated[StrictStr, AfterValidator(_an_object)]


class ToolCall(Part):
    """One call of an earlier answer."""

    id: StrictStr
    type: Literal["function"] = "function"
    function: Call


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=128)]
