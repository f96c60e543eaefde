"""What may a line for /v1/chat/completions hold?"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from service.bodies.formats import ResponseFormat
from service.bodies.parameters import Object, Part, Refused, Sequenced, without_nulls
from service.bodies.tools import ToolCall, ToolChoice, Tools


class TextPart(Part):
    """One piece of a message's content; only text is served."""

    type: Literal["text"]
    text: StrictStr
    prompt_cache_breakpoint: Object | None = None


def _content(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise PydanticCustomError("content_type", "expected a string, or an array of text parts")


class Message(Part):
    """One turn of a chat; a turn that calls tools may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    function_call: Annotated[Object, Refused()] | None = None
    audio: Annotated[Object, Refused()] | None = None
    refusal: Annotated[StrictStr, Refused()] | None = None
    content: Annotated[StrictStr | list[TextPart], BeforeValidator(_content)] | None = None
    name: StrictStr | None = None
    # Sources that an earlier answer named; not part of what was said.
    annotations: list[Any] | None = None

    _nulls = model_validator(mode="before")(without_nulls)

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatBody(Sequenced):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None

    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: Annotated[list[Any], Refused([])] | None = None
    function_call: Annotated[StrictStr | Object, Refused("none", "auto")] | None = None
    modalities: Annotated[list[StrictStr], Refused(["text"])] | None = None
    audio: Annotated[Object, Refused()] | None = None
    moderation: Annotated[Object, Refused()] | None = None
    prediction: Annotated[Object, Refused()] | None = None
    reasoning_effort: Annotated[StrictStr, Refused("none")] | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], Refused("medium")] | None = None
    web_search_options: Annotated[Object, Refused()] | None = None
