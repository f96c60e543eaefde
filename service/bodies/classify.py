"""What may a line for /v1/classify hold?

Three kinds of models answer it: those that were trained on labels score a text, those that score
tokens find spans in it, and embedding models compare it with labels that the body names.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, StrictInt

from service.bodies.parameters import Body, Text, Tokens, Truncate, distinct
from service.catalog import ModelKind

MAX_TEMPLATES = 64
PLACE = "{}"
"""Where a template has its label."""

DEFAULT_TEMPLATE = f"This text is about {PLACE}."


class Aggregation(StrEnum):
    """How the labels of tokens become spans, as the transformers pipeline has it."""

    NONE = "none"
    SIMPLE = "simple"
    FIRST = "first"
    AVERAGE = "average"
    MAX = "max"


def _one_place(template: str) -> str:
    if template.count(PLACE) != 1:
        msg = f"a template needs {PLACE} once, where the label goes"
        raise ValueError(msg)
    return template


class ClassifyBody(Body):
    """POST /v1/classify. `input` is always a list; one of texts or one of token ids."""

    input: Annotated[list[Text] | list[Tokens], Field(min_length=1)]
    truncate: Truncate = None
    return_all_scores: StrictBool | None = None
    logits: StrictBool | None = None

    labels: Annotated[list[Text], Field(min_length=1), AfterValidator(distinct)] | None = None
    templates: (
        Annotated[
            list[Annotated[Text, AfterValidator(_one_place)]],
            Field(min_length=1, max_length=MAX_TEMPLATES),
        ]
        | None
    ) = None
    multi_label: StrictBool | None = None
    prompt_name: Text | None = None

    aggregation: Aggregation | None = None
    overlap: Annotated[StrictInt, Field(ge=0)] | None = None

    @property
    def labelled(self) -> list[str]:
        """Each label in each template, label by label."""
        templates = self.templates or [DEFAULT_TEMPLATE]
        return [
            template.replace(PLACE, label) for label in self.labels or [] for template in templates
        ]


OF_KINDS: Mapping[str, frozenset[ModelKind]] = {
    "return_all_scores": frozenset({ModelKind.CLASSIFY, ModelKind.EMBED}),
    "logits": frozenset({ModelKind.CLASSIFY, ModelKind.EMBED}),
    "labels": frozenset({ModelKind.EMBED}),
    "templates": frozenset({ModelKind.EMBED}),
    "multi_label": frozenset({ModelKind.EMBED}),
    "prompt_name": frozenset({ModelKind.EMBED}),
    "aggregation": frozenset({ModelKind.TOKEN_CLASSIFY}),
    "overlap": frozenset({ModelKind.TOKEN_CLASSIFY}),
}
"""Which models honour the parameters that not all of them do."""
