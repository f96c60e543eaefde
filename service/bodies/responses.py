"""What may a line for /v1/responses hold?"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from service.bodies.formats import TextFormat
from service.bodies.parameters import Object, Part, Refused, Sampled, without_nulls


class TextPart(Part):
    """One piece of a message's content, of a client or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: StrictStr
    # What an earlier answer held beside its text.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Object | None = None


def _content(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise PydanticCustomError("content_type", "expected a string, or an array of text parts")


class Item(Part):
    """One turn: an easy message, or one as an earlier response put it out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[StrictStr | list[TextPart], BeforeValidator(_content)]
    id: StrictStr | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: StrictStr | None = None

    _nulls = model_validator(mode="before")(without_nulls)

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextConfig(Part):
    """How the answer is to be written."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], Refused("medium")] | None = None


class Reasoning(Part):
    """How long the model is to think: not at all."""

    effort: Annotated[StrictStr, Refused("none")] | None = None
    summary: Annotated[StrictStr, Refused()] | None = None
    generate_summary: Annotated[StrictStr, Refused()] | None = None
    context: Annotated[StrictStr, Refused("auto")] | None = None
    mode: Annotated[StrictStr, Refused("standard")] | None = None


def _turns(value: object) -> object:
    """A text is one turn of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "expected a string, or an array of messages")


class ResponsesBody(Sampled):
    """POST /v1/responses. `input` is always a list of messages."""

    input: Annotated[list[Item], BeforeValidator(_turns), Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    text: TextConfig | None = None
    # Of tools, of which there are none.
    max_tool_calls: Annotated[StrictInt, Field(ge=1)] | None = None

    access_programs: Annotated[Object, Refused()] | None = None
    background: Annotated[StrictBool, Refused(False)] | None = None
    background_options: Annotated[Object, Refused()] | None = None
    context_management: Annotated[list[Any], Refused([])] | None = None
    conversation: Annotated[StrictStr | Object, Refused()] | None = None
    image: Annotated[Object, Refused()] | None = None
    include: Annotated[list[StrictStr], Refused([])] | None = None
    moderation: Annotated[Object, Refused()] | None = None
    parallel_tool_calls: Annotated[StrictBool, Refused(True, False)] | None = None
    previous_response_id: Annotated[StrictStr, Refused()] | None = None
    prompt: Annotated[Object, Refused()] | None = None
    reasoning: Reasoning | None = None
    tool_choice: Annotated[StrictStr | Object, Refused("none", "auto")] | None = None
    tools: Annotated[list[Any], Refused([])] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20), Refused(0)] | None = None
    truncation: Annotated[Literal["auto", "disabled"], Refused("disabled")] | None = None
