"""What may a line for /v1/completions hold?"""

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StrictStr

from service.bodies.parameters import Refused, Sequenced, Text, Tokens

MAX_PROMPTS = 128


class CompletionBody(Sequenced):
    """POST /v1/completions. `prompt` is always a list; one of texts or one of token ids."""

    prompt: Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]

    # So many answers are made, of which the `n` likeliest are told; 0 and 1 ask for no others.
    best_of: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    # Even 0 asks for the logprob of each token.
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    suffix: Annotated[StrictStr, Refused("")] | None = None
