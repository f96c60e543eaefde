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


class ResponseFormat(Part):
    """As chat has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def schema_of_json(self) -> Object | None:
        """The schema that the answer keeps to; None for a text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"type": "object"}
            case "json_schema":
                return (self.json_schema and self.json_schema.schema_) or {}


class TextFormat(NamedSchema):
    """As responses have it: the schema stands beside the type."""

    type: Literal["text", "json_object", "json_schema"]

    @property
    def schema_of_json(self) -> Object | None:
        """The schema that the answer keeps to; None for a text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"type": "object"}
            case "json_schema":
                return self.schema_ or {}
