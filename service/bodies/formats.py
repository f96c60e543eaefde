"""What form may an answer be asked to have?"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictStr

from service.bodies.parameters import Object, Part

Name = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class NamedSchema(Part):
    """A JSON schema under a name; the answer keeps to it whether it is `strict` or not."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True)

    name: Name | None = None
    description: StrictStr | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


FormatType = Literal["text", "json_object", "json_schema"]


class ResponseFormat(Part):
    """As chat has it."""

    type: FormatType
    json_schema: NamedSchema | None = None

    @property
    def schema_of_json(self) -> Object | None:
        """The schema that the answer keeps to; None for a text."""
        return _schema_of(self.type, self.json_schema)


class TextFormat(NamedSchema):
    """As responses have it: the schema stands beside the type."""

    type: FormatType

    @property
    def schema_of_json(self) -> Object | None:
        """The schema that the answer keeps to; None for a text."""
        return _schema_of(self.type, self)


def _schema_of(kind: FormatType, named: NamedSchema | None) -> Object | None:
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            return (named and named.schema_) or {}
