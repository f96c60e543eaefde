"""What may a line for /v1/moderations hold?"""

from typing import Annotated

from pydantic import Field

from service.bodies.parameters import Body, Text, Truncate


class ModerationBody(Body):
    """POST /v1/moderations. `input` is always a list of texts; images are not served."""

    input: Annotated[list[Text], Field(min_length=1)]
    # Ours.
    truncate: Truncate = None
