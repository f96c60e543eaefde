"""Of what are all bodies made: their common parameters, and what becomes of unsupported ones?

Every parameter that the reference's endpoint has stands in its shape with its type and range. Those
that the engine honours are read; those that change no answer are harmless; the others are
`Refused`, except for values that ask for nothing, which are as absent.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_METADATA_PAIRS = 16
MAX_BIASES = 1024
MAX_LABELS = 1024

Number = StrictFloat | StrictInt
Stop = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STOPS),
]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Text = Annotated[StrictStr, Field(min_length=1)]
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenKey = Annotated[StrictStr, Field(pattern=r"^[0-9]{1,9}$")]
LogitBias = Annotated[
    dict[TokenKey, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
]
Metadata = Annotated[
    dict[
        Annotated[StrictStr, Field(max_length=64)],
        Annotated[StrictStr, Field(max_length=512)],
    ],
    Field(max_length=MAX_METADATA_PAIRS),
]
Labels = Annotated[
    list[Text], Field(min_length=1, max_length=MAX_LABELS), AfterValidator(lambda v: distinct(v))
]
Truncate = StrictBool | None
"""Ours: what is over the context is cut, and reported in the usage, instead of being refused."""

Object = dict[StrictStr, Any]


def distinct(labels: list[str]) -> list[str]:
    """The labels, none of which may stand twice."""
    if len(set(labels)) < len(labels):
        msg = "a label stands twice"
        raise ValueError(msg)
    return labels


def Refused(*neutral: object) -> AfterValidator:  # noqa: N802 - read as a word of the type
    """The parameter is not honoured: only null, and values that ask for nothing, are taken."""

    def refuse(value: object) -> None:
        if not any(_same(value, each) for each in neutral):
            raise PydanticCustomError("unsupported_parameter", "is not supported")

    return AfterValidator(refuse)


def _same(value: object, neutral: object) -> bool:
    # To Python False is 0; here `logprobs: 0` asks for something that `logprobs: false` does not.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class Part(BaseModel):
    """What stands inside a body: frozen, and nothing in it is passed over in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Body(Part):
    """Every endpoint's: the model, and what the reference takes that changes no answer."""

    model: StrictStr
    user: StrictStr | None = None
    store: StrictBool | None = None
    metadata: Metadata | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: StrictStr | None = None


class Sampled(Body):
    """What every generating endpoint has."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    stream: Annotated[StrictBool, Refused(False)] | None = None
    stream_options: Annotated[Object, Refused()] | None = None


class Sequenced(Sampled):
    """What chat and completions share."""

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None

    # Ours, named as other servers name them.
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool | None = None
    choice: Labels | None = None
    regex: Text | None = None
    grammar: Text | None = None


def without_nulls(value: object) -> object:
    """Null is as absent, so an object that an answer held can be sent again as it came."""
    if not isinstance(value, dict):
        raise PydanticCustomError("object_type", "expected an object")
    return {name: given for name, given in value.items() if given is not None}
