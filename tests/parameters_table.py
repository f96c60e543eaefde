"""What must docs/api.md say of parameters? `python -m tests.parameters_table` prints it."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel

from service.bodies.check import SHAPES
from service.bodies.parameters import Body, Refused

HEADING = "| endpoint | honoured | taken, changes nothing | refused |\n|---|---|---|---|"

# `Refused` makes its validators from this one function.
_REFUSING = Refused().func.__qualname__

NO_EFFECT = {*Body.model_fields, "max_tool_calls"} - {"model"}


def table() -> str:
    """The whole table in Markdown."""
    return "\n".join([HEADING, *(_row(endpoint, shape) for endpoint, shape in SHAPES.items())])


def _row(endpoint: str, shape: type[Body]) -> str:
    columns: dict[str, list[str]] = {"honoured": [], "taken": [], "refused": []}
    for name, field in shape.model_fields.items():
        columns[_kind(name, field.annotation)].append(f"`{name}`")
    cells = (", ".join(sorted(names)) or "–" for names in columns.values())
    return f"| `{endpoint}` | {' | '.join(cells)} |"


def _kind(name: str, annotation: Any) -> str:
    if name in NO_EFFECT:
        return "taken"
    return "refused" if is_refused(annotation) else "honoured"


def is_refused(annotation: Any) -> bool:
    """Whether the parameter is, or all that it can hold."""
    return any(_refused_in(annotation))


def _refused_in(annotation: Any) -> Iterator[bool]:
    for each in (annotation, *get_args(annotation)):
        for validator in getattr(each, "__metadata__", ()):
            if isinstance(validator, AfterValidator):
                yield validator.func.__qualname__ == _REFUSING
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield all(is_refused(field.annotation) for field in each.model_fields.values())


if __name__ == "__main__":
    print(table())  # noqa: T201 - to be pasted
