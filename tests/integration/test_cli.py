"""Does the command say what it does, and in one line why it does not? Without a running stack."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from service.ids import new_id
from service.places import part_key
from service.settings import Settings
from service.stack.parts import EmbeddedUrls
from service.stack.ports import LOOPBACK
from service.storage import Storage

ROOT = Path(__file__).parents[2]


class Halfrate:
    """The command, with nothing of ours in its environment but what a test puts there."""

    def __init__(self, folder: Path, catalog: Path) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - for a child
        self.home = folder / "home"
        self.environment = {
            **inherited,
            "HALFRATE_HOME": str(self.home),
            "HALFRATE_MODELS": str(folder / "models"),
            "HALFRATE_CATALOG": str(catalog),
        }

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "service.cli.main", *arguments],
            cwd=ROOT,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def works(self, *arguments: str, **variables: str) -> str:
        ended = self(*arguments, **variables)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def fails(self, *arguments: str, **variables: str) -> str:
        """The one line that says why."""
        ended = self(*arguments, **variables)
        assert ended.returncode == 1, ended.stdout
        assert "Traceback" not in ended.stderr
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        return ended.stderr


@pytest.fixture
def halfrate(tmp_path: Path, stub_catalog: Path) -> Halfrate:
    return Halfrate(tmp_path, stub_catalog)


def test_help_names_every_command(halfrate: Halfrate) -> None:
    shown = halfrate.works("--help")

    for command in ("up", "down", "status", "project", "key", "models", "migrate", "backup", "run"):
        assert f" {command} " in shown


def test_help_imports_nothing_heavy() -> None:
    heavy = (
        "{'sqlalchemy', 'alembic', 'boto3', 'celery', 'fastapi', 'pydantic', 'torch', 'psycopg'}"
    )
    program = f"import sys, service.cli.main; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert ended.stdout.strip() == "[]"


def test_status_before_any_start_shows_every_part_stopped(halfrate: Halfrate) -> None:
    parts = json.loads(halfrate.works("status", "--json"))["parts"]

    assert [part["name"] for part in parts] == [
        "postgres",
        "valkey",
        "seaweedfs",
        "api",
        "cpu",
        "beat",
        "engine.stub-embed",
        "engine.stub-chat",
    ]
    stopped = {"pid": None, "port": None, "url": None, "state": "stopped", "restarts": 0}
    assert all(part == {"name": part["name"], **stopped} for part in parts)
    assert not halfrate.home.exists()


def test_a_part_that_is_brought_by_url_is_not_ours(halfrate: Halfrate) -> None:
    shown = halfrate.works("status", "--json", HALFRATE_REDIS_URL="redis://elsewhere:6379/0")

    assert "valkey" not in [part["name"] for part in json.loads(shown)["parts"]]


def test_down_where_nothing_runs_is_fine_and_makes_nothing(halfrate: Halfrate) -> None:
    assert "does not run" in halfrate.works("down")
    assert not halfrate.home.exists()


def test_up_refuses_a_model_that_the_catalog_lacks(halfrate: Halfrate) -> None:
    said = halfrate.fails("up", "--serve=stub-embed,other")

    assert "No model 'other'" in said
    assert "stub-chat" in said


def test_up_refuses_a_port_that_is_taken(halfrate: Halfrate) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]

        assert f"Port {port} is taken" in halfrate.fails("up", f"--port={port}")


def test_a_catalog_that_cannot_be_read_is_named(halfrate: Halfrate, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")

    assert missing in halfrate.fails("up", HALFRATE_CATALOG=missing)


def test_models_are_listed_with_their_prices(halfrate: Halfrate) -> None:
    line = next(row for row in halfrate.works("models", "list").splitlines() if "chat" in row)

    assert line.split()[:2] == ["stub-chat", "generate"]
    assert "0.10 / 0.40" in line


def test_an_unknown_model_cannot_be_pulled(halfrate: Halfrate) -> None:
    assert "No model 'other'" in halfrate.fails("models", "pull", "other")


def test_pulling_needs_no_name(halfrate: Halfrate) -> None:
    assert halfrate("models", "pull").returncode == 0


@pytest.mark.parametrize("command", [["key", "create"], ["key", "list"], ["migrate"]])
def test_without_a_database_the_command_says_how_to_name_one(
    halfrate: Halfrate, command: list[str]
) -> None:
    said = halfrate.fails(*command)

    assert "HALFRATE_DATABASE_URL" in said
    assert "halfrate up" in said


@pytest.mark.parametrize("command", [["key", "create"], ["migrate"]])
def test_a_database_that_is_away_is_one_line(halfrate: Halfrate, command: list[str]) -> None:
    nobody = "postgresql://nobody:word@127.0.0.1:1/none"

    said = halfrate.fails(*command, HALFRATE_DATABASE_URL=nobody)

    assert "word" not in said


def test_keys_are_made_listed_and_revoked(halfrate: Halfrate, database_url: str) -> None:
    where = {"HALFRATE_DATABASE_URL": database_url}
    key = halfrate.works("key", "create", "--project=tags", "--name=mine", **where).strip()
    line = next(row for row in halfrate.works("key", "list", **where).splitlines() if "mine" in row)

    assert key.startswith("sk-hr-")
    assert len(key.split()) == 1
    assert key not in line
    assert line.split()[1:3] == ["tags", "mine"]
    assert "submit" in line
    halfrate.works("key", "revoke", line.split()[0], **where)
    assert "revoked" in halfrate.works("key", "list", **where)


def test_projects_are_made_once_and_listed(halfrate: Halfrate, database_url: str) -> None:
    where = {"HALFRATE_DATABASE_URL": database_url}
    project = halfrate.works("project", "create", "tags and more", **where).strip()
    halfrate.works("key", "create", "--project=tags and more", **where)
    shown = halfrate.works("project", "list", **where).splitlines()
    (line,) = [row for row in shown if "tags and more" in row]

    assert project.startswith("proj_")
    assert line.startswith(project)
    assert line.split()[-2:] == ["1", "–"]
    assert "already" in halfrate.fails("project", "create", "tags and more", **where)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 65])
def test_a_project_needs_a_name_that_can_be_shown(
    halfrate: Halfrate, database_url: str, name: str
) -> None:
    assert "name" in halfrate.fails("project", "create", name, HALFRATE_DATABASE_URL=database_url)


@pytest.mark.parametrize("key_id", ["other", "key_01a22deded2a7c3e93577355fbb9e0ac"])
def test_what_is_no_key_cannot_be_revoked(
    halfrate: Halfrate, database_url: str, key_id: str
) -> None:
    assert key_id in halfrate.fails("key", "revoke", key_id, HALFRATE_DATABASE_URL=database_url)


def test_migrate_makes_the_tables_and_may_be_repeated(
    halfrate: Halfrate, urls: EmbeddedUrls
) -> None:
    server, name = urls.database_url.rsplit("/", 1)[0], "test_cli_migrate"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    url = f"{server}/{name}"

    assert "up to date" in halfrate.works("migrate", HALFRATE_DATABASE_URL=url)
    assert "up to date" in halfrate.works("migrate", HALFRATE_DATABASE_URL=url)

    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM batches").fetchone() == (0,)
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


def test_a_process_without_its_settings_names_them(halfrate: Halfrate) -> None:
    ended = halfrate("run", "api")

    assert ended.returncode == 1
    assert "HALFRATE_DATABASE_URL" in ended.stderr
    assert "HALFRATE_REDIS_URL" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_wrong_usage_is_status_two(halfrate: Halfrate) -> None:
    assert halfrate("key", "create", "--right=everything").returncode == 2
    assert halfrate("nothing").returncode == 2


def test_the_doctor_says_what_is_wrong_and_mends_it(
    halfrate: Halfrate, settings: Settings, storage: Storage
) -> None:
    where = {
        "HALFRATE_DATABASE_URL": settings.database_url.get_secret_value(),
        "HALFRATE_REDIS_URL": settings.redis_url.get_secret_value(),
        "HALFRATE_S3_ENDPOINT_URL": str(settings.s3_endpoint_url),
        "HALFRATE_S3_BUCKET": settings.s3_bucket,
    }
    for name in ("s3_access_key_id", "s3_secret_access_key"):
        secret = getattr(settings, name)
        where[f"HALFRATE_{name.upper()}"] = secret.get_secret_value()
    assert halfrate.works("doctor", **where) == "All is well.\n"
    stray = part_key(new_id(), new_id(), 1, 0)
    storage.put(stray, b"x")
    said = halfrate("doctor", **where)
    assert said.returncode == 1
    assert said.stdout == (
        f"parts: 1 objects under parts/ that no row names, such as {stray}."
        " --fix would: remove them\n"
    )
    assert said.stderr == "1 findings are left. --fix mends what it can.\n"
    shown = json.loads(halfrate("doctor", "--json", **where).stdout)
    assert (shown["check"], shown["mendable"], shown["mended"]) == ("parts", True, False)
    assert halfrate.works("doctor", "--fix", **where).endswith("All is well.\n")
    assert list(storage.list("parts/")) == []


def test_the_doctor_of_a_home_without_a_stack_says_so(halfrate: Halfrate) -> None:
    assert "halfrate up" in halfrate.fails("doctor")
