"""What may a line for /v1/embeddings hold?"""

from typing import Annotated, Literal

from pydantic import Field, StrictInt

from service.bodies.parameters import Body, Text, Tokens, Truncate


class EmbeddingsBody(Body):
    """POST /v1/embeddings. `input` is always a list; one of texts or one of token ids."""

    input: Annotated[list[Text] | list[Tokens], Field(min_length=1)]
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    # Ours.
    prompt_name: Text | None = None
    truncate: Truncate = None
