"""What must the README's settings table say? `python -m tests.settings_table` prints it."""

from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from service.catalog import DEFAULT_CATALOG
from service.settings import GIB, MIB, Settings
from worker.settings import WorkerSettings

PREFIX = "HALFRATE_"
HEADING = "| setting | default | what it is |\n|---|---|---|"


def table() -> str:
    """The whole table in Markdown: every setting once, in the order in which they are declared."""
    return "\n".join([HEADING, *(_row(name, field) for name, field in settings())])


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Each setting's variable and its field: of every process, then of workers alone."""
    for group in (Settings, WorkerSettings):
        for name, field in group.model_fields.items():
            yield f"{PREFIX}{name.upper()}", field


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {shown_default(field)} | {field.description} |"


def shown_default(field: FieldInfo) -> str:
    """The default as one would write it into the environment, or in a word why there is none."""
    if field.is_required():
        return "required; `halfrate up` brings its own"
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case None | ():
            return "unset"
        case Path() if value == DEFAULT_CATALOG:
            return "the one of the package `service`"
        case Path() if value.is_relative_to(Path.home()):
            return f"`~/{value.relative_to(Path.home())}`"
        case int() if value and value % MIB == 0:
            amount = f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
            return f"`{value}` ({amount})"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


if __name__ == "__main__":
    print(table())  # noqa: T201 - to be pasted
