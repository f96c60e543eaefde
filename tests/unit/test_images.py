"""Do the Dockerfiles agree with the Makefile and the code? No image is built."""

import re
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
import yaml

from service.settings import Settings
from tests.containers import (
    DOCKERFILES,
    PROJECT,
    ROOT,
    SECRET_WORDS,
    environment,
    image_variables,
    instructions,
    parse_command,
    variables_of,
)
from tests.settings_table import PREFIX


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_runs_a_command_of_the_cli_by_default(folder: str) -> None:
    (entrypoint,) = instructions(folder, "ENTRYPOINT")
    (command,) = instructions(folder, "CMD")
    assert yaml.safe_load(entrypoint) == list(PROJECT["scripts"])
    parse_command(yaml.safe_load(command))


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_installs_as_the_makefile_does(folder: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (install,) = re.findall(r"^INSTALL := (.*)$", makefile, re.MULTILINE)
    ours = [line for line in instructions(folder, "RUN") if "pip install" in line]
    assert len(ours) == 2
    for line in ours:
        words = shlex.split(line)
        words = [word for word in words if word not in ("--no-cache-dir", "$PIP_EXTRA_ARGS")]
        # Same options; then the project itself, not editable.
        wanted = shlex.split(install)[1:]
        assert words[1 : 1 + len(wanted)] == wanted
        (target,) = [word for word in words[1 + len(wanted) :] if not word.startswith("--")]
        assert target.partition("[")[0] == "."
    assert [extras(line) for line in ours] == [extras_of_image(folder), set()]
    assert "--no-deps" in ours[1]
    assert "--no-deps" not in ours[0]


def test_images_hold_what_make_setup_installs_but_for_the_embedded_stack() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    setup = re.findall(r"\$\(INSTALL\) -e ('\S+')", makefile)[0]
    together = extras_of_image("service") | extras_of_image("worker")
    assert together == extras(setup) - {"embedded", "examples"}


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_everything_an_image_copies_is_in_the_repository_and_seen_by_the_build(folder: str) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    seen = {line[1:] for line in lines if line.startswith("!")}
    assert lines.index("*") < min(lines.index(f"!{name}") for name in seen)
    copied = {
        source
        for line in instructions(folder, "COPY")
        if not line.startswith("--from=")
        for source in shlex.split(line)[:-1]
    }
    needed = {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"]}
    assert needed <= copied <= seen
    for source in copied:
        assert (ROOT / source).exists()
    used = {name for f in DOCKERFILES for name in seen if f" {name}" in DOCKERFILES[f]}
    assert used == seen


def test_the_worker_image_holds_every_package_and_the_service_image_no_worker() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(configuration["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = {
        folder: {line.split()[0] for line in instructions(folder, "COPY")} & packages
        for folder in DOCKERFILES
    }
    assert copied == {"worker": packages, "service": {"service", "migrations"}}


SERVICE_WORK = """
import service.cli.keys, service.cli.serve
from pathlib import Path
from service.api.app import app_from_environment
from service.cli.database import migrate, opened
from service.settings import Settings
from service.storage import Storage
from service.wake import Waker
app_from_environment()
migrate(Path())
with opened(Path()) as database, database.transaction(): pass
Waker(Settings().redis_url.get_secret_value()).ping()
Storage.from_settings(Settings()).ensure_bucket()
"""
WORKER_WORK = """
import pkgutil, service.cli.run, engine, worker
for package in (engine, worker):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("triton_spans"):  # torch for CUDA brings triton
            __import__(found.name)
from worker.app import app
app.loader.import_default_modules()
app.connection_for_read().ensure_connection(max_retries=1)
import pip
"""


@pytest.mark.parametrize(
    ("folder", "lacking", "work"),
    [("service", {"worker", "engine"}, SERVICE_WORK), ("worker", set(), WORKER_WORK)],
)
def test_an_image_holds_every_package_that_its_work_needs(
    folder: str, lacking: set[str], work: str, settings: Settings
) -> None:
    asked = [f"{PROJECT['name']}[{extra}]" for extra in extras_of_image(folder)]
    brought = closure([PROJECT["name"], "pip", *asked])
    # Here all extras are installed, so what the image lacks is made to fail when imported.
    absent = lacking | {
        module
        for module, distributions in packages_distributions().items()
        if brought.isdisjoint(map(normal, distributions))
    }
    script = f"import sys\nfor name in {sorted(absent)!r}: sys.modules[name] = None\n{work}"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(variables_of(settings)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("folder", DOCKERFILES)
def test_an_image_holds_no_secret_and_no_address_of_a_registry(folder: str) -> None:
    text = DOCKERFILES[folder]
    assert "://" not in text
    for_a_gpu = ['APT_PACKAGES=""'] if folder == "worker" else []
    assert instructions(folder, "ARG") == ['PIP_EXTRA_ARGS=""', *for_a_gpu]
    assert not [key for key in image_variables(folder) if any(word in key for word in SECRET_WORDS)]
    assert {line.split()[0] for line in instructions(folder, "FROM")} == {"python:3.11-slim"}


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_of_the_api_believes_its_answer(status: int, healthy: bool) -> None:
    with answering(status) as port:
        assert is_healthy("service", {f"{PREFIX}PORT": str(port)}) is healthy


def test_the_health_check_of_the_api_notices_silence() -> None:
    assert not is_healthy("service", {f"{PREFIX}PORT": str(free_port())})


def test_a_worker_is_healthy_while_it_is_connected_to_the_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker:
        port = broker.getsockname()[1]
        variables = {f"{PREFIX}REDIS_URL": f"redis://:secret@valkey:{port}/0"}
        assert not is_healthy("worker", variables)
        with socket.create_connection(("127.0.0.1", port)):
            assert is_healthy("worker", variables)


def extras(text: str) -> set[str]:
    found = re.search(r"\.\[([\w,]+)\]", text)
    return set(found[1].split(",")) if found else set()


def extras_of_image(folder: str) -> set[str]:
    return {"service": set(), "worker": {"worker"}}[folder]


def normal(requirement: str) -> str:
    """The name of a requirement, spelled as the index does."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that these requirements install, each by its normal name."""
    found: set[str] = set()
    waiting = [(normal(requirement), extras_named(requirement)) for requirement in requirements]
    while waiting:
        name, wanted = waiting.pop()
        if name in found and not wanted:
            continue
        found.add(name)
        for requirement in requirements_of(name):
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
            if extra is None or extra[1] in wanted:
                waiting.append((normal(requirement), extras_named(requirement)))
    return found


def requirements_of(name: str) -> list[str]:
    """As installed; but ours as pyproject.toml has them now."""
    if name == PROJECT["name"]:
        optional = PROJECT["optional-dependencies"].items()
        return [
            *PROJECT["dependencies"],
            *(f'{entry}; extra == "{extra}"' for extra, entries in optional for entry in entries),
        ]
    try:
        return requires(name) or []
    except PackageNotFoundError:  # for another platform
        return []


def extras_named(requirement: str) -> frozenset[str]:
    """`redis` of `celery[redis]>=5`."""
    named = re.match(r"[\w.-]+\[([\w,\s-]+)\]", requirement)
    return frozenset(word.strip() for word in named[1].split(",")) if named else frozenset()


def is_healthy(folder: str, variables: dict[str, str]) -> bool:
    """Run the image's health check here."""
    (line,) = instructions(folder, "HEALTHCHECK")
    command = yaml.safe_load(line.partition("CMD ")[2])
    assert command[0] == "python"
    ended = subprocess.run(
        [sys.executable, *command[1:]], env=environment(variables), capture_output=True, check=False
    )
    return ended.returncode == 0


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers /health/ready, and nothing else, with that status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
