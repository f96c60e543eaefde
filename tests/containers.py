"""What do docker-compose.yml, the Dockerfiles and pyproject.toml say, as values for tests?"""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import SecretStr

from service.cli.main import app
from service.settings import Settings
from tests.settings_table import PREFIX

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILES = {
    folder: (ROOT / folder / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    for folder in ("service", "worker")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# `$$` is a literal dollar; `${NAME}`, `${NAME:-default}` and `${NAME:?message}` are filled in.
REFERENCE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
SECRET_WORDS = ("PASSWORD", "SECRET", "KEY")


def filled(text: str) -> str:
    """Text as Compose passes it on, each required variable filled with its own name."""

    def value(found: re.Match[str]) -> str:
        if found["name"] is None:
            return "$"
        return found["rest"] if found["kind"] == "-" else found["name"]

    return REFERENCE.sub(value, text)


def references(text: str) -> list[re.Match[str]]:
    """Every variable that Compose fills in."""
    return [found for found in REFERENCE.finditer(text) if found["name"]]


def folder_of(service: dict[str, Any]) -> str:
    """Beside which package the Dockerfile of a service of ours lies."""
    assert service["build"]["context"] == "."
    return str(Path(service["build"]["dockerfile"]).parent)


def instructions(folder: str, word: str) -> list[str]:
    """What follows `word` in the Dockerfile, continued lines joined."""
    return re.findall(rf"^{word} (.*)$", DOCKERFILES[folder], re.MULTILINE)


def image_variables(folder: str) -> dict[str, str]:
    """What the image puts into the environment."""
    words = [word for line in instructions(folder, "ENV") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def variables_of(settings: Settings) -> dict[str, str]:
    """What to set for another process to have the same parts and the same catalog."""
    given = settings.model_dump(exclude_unset=True)
    return {
        f"{PREFIX}{name.upper()}": value.get_secret_value()
        if isinstance(value, SecretStr)
        else str(value)
        for name, value in given.items()
    }


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's, without settings of its own and without a proxy."""
    own = os.environ  # noqa: TID251 - handed on to a program
    kept = {name: value for name, value in own.items() if not name.startswith(PREFIX)}
    return kept | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*"} | variables


def parse_command(words: list[str]) -> None:
    """Parse as `halfrate` would, to the last option; runs nothing."""
    command: Any = typer.main.get_command(app)
    context, rest = None, list(words)
    while hasattr(command, "commands"):
        context = command.make_context(command.name or "halfrate", rest, parent=context)
        # A group takes the first word that is not an option of its own off the others.
        left = [*context._protected_args, *context.args]
        _, command, rest = command.resolve_command(context, left)
    command.make_context(command.name, rest, parent=context)
