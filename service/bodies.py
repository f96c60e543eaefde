"""What may the body of a request line hold, per endpoint?

A fault here fails its line alone, with 400 in the error file. Nothing is ignored silently: a
parameter that the engine does not honour is refused unless it is harmless or at its neutral value.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from service.faults import Fault, first_fault

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_PROMPTS = 128

# Parameters of the reference that change nothing about an answer: taken and not looked at.
HARMLESS = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
)

# Parameters not honoured yet, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

Number = StrictFloat | StrictInt
Stop = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STOPS),
]


class InvalidBody(Exception):
    """The line's 400: what is wrong with its body."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: StrictStr


class TextPart(BaseModel):
    """One piece of a message's content; only text is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"]
    text: StrictStr


def _content(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise PydanticCustomError("content_type", "expected a string, or an array of text parts")


Content = Annotated[StrictStr | list[TextPart], BeforeValidator(_content)]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        """A message that an answer held can be sent again as it came, its nulls included."""
        if not isinstance(value, Mapping):
            raise PydanticCustomError("message_type", "expected an object")
        return {name: given for name, given in value.items() if given is not None}

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class _Sampled(_Body):
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None


class ChatBody(_Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Text = Annotated[StrictStr, Field(min_length=1)]


class CompletionBody(_Sampled):
    """POST /v1/completions. `prompt` is always a list; one of texts or one of token ids."""

    prompt: Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class EmbeddingsBody(_Body):
    """POST /v1/embeddings. `input` is always a list; one of texts or one of token ids."""

    input: Annotated[list[Text] | list[Tokens], Field(min_length=1)]
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


Checked = TypeVar("Checked", bound=_Body)


def chat(body: Mapping[str, Any]) -> ChatBody:
    """The checked body of a chat line. Raises InvalidBody."""
    return _check(ChatBody, _without_neutral(body))


def completion(body: Mapping[str, Any]) -> CompletionBody:
    """The checked body of a completions line. Raises InvalidBody."""
    given = _without_neutral(body)
    return _check_listed(CompletionBody, given, "prompt", _listed(given, "prompt"))


def embeddings(body: Mapping[str, Any], *, max_inputs: int) -> EmbeddingsBody:
    """The checked body of an embeddings line. Raises InvalidBody."""
    given = _without_neutral(body)
    inputs = _listed(given, "input")
    if len(inputs) > max_inputs:
        message = (
            f"Invalid 'input': at most {max_inputs} inputs a line are allowed, "
            f"but this one has {len(inputs)}."
        )
        raise InvalidBody(Fault(message, "input", "invalid_value"))
    return _check_listed(EmbeddingsBody, given, "input", inputs)


def _listed(given: Mapping[str, Any], name: str) -> list[Any]:
    """A text, texts, token ids or lists of token ids, as a list of texts or of lists of ids."""
    value = given.get(name)
    if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
        raise InvalidBody(Fault(f"Invalid '{name}': it must not be empty.", name, "invalid_value"))
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [value] if all(type(item) is int for item in value) else value
    message = f"Invalid type for '{name}': expected a string, or an array of strings or tokens."
    raise InvalidBody(Fault(message, name, "invalid_type"))


def _without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be looked at: null is as absent. Raises InvalidBody for what is not honoured."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in NEUTRAL:
            if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                raise InvalidBody(Fault(message, name, "unsupported_parameter"))
            continue
        kept[name] = value
    return kept


def _same(value: object, neutral: object) -> bool:
    # To Python False is 0; here `logprobs: 0` asks for something that `logprobs: false` does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _check_listed(
    shape: type[Checked], given: Mapping[str, Any], name: str, listed: list[Any]
) -> Checked:
    """A fault inside a value that was no list before is a fault of the whole value."""
    try:
        return _check(shape, {**given, name: listed})
    except InvalidBody as invalid:
        param = invalid.fault.param or ""
        if listed == given[name] or not param.startswith(f"{name}.0"):
            raise
        shown = name + param.removeprefix(f"{name}.0")
        message = invalid.fault.message.replace(f"'{param}'", f"'{shown}'")
        raise InvalidBody(Fault(message, shown, invalid.fault.code)) from None


def _check(shape: type[Checked], body: Mapping[str, Any]) -> Checked:
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise InvalidBody(first_fault(error, given=body)) from None
