"""Does `halfrate up` bring a whole stack to life, keep it alive, and take it away again?

One stack is shared by the tests here; they stand in the order in which it is treated worse.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.stack.home import Home, holder
from service.stack.ports import LOOPBACK, is_free
from service.stack.record import outside_files, read_record
from service.stack.sweep import leftovers

ROOT = Path(__file__).parents[2]
CATALOG = '[[models]]\nid = "stub-embed"\nkind = "embed"\nsource = "stub:"\nprice_input = 0.02\n'
PARTS = ["postgres", "valkey", "seaweedfs", "api", "cpu", "beat", "engine.stub-embed"]
# Longer than the 107 bytes that the path of a unix socket may have.
LONG = "a-home-with-a-rather-long-name-" * 4


@dataclass(frozen=True)
class Stack:
    """One home, steered by the command."""

    home: Home
    environment: dict[str, str]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "service.cli.main", *arguments, f"--home={self.home.root}"]

    def halfrate(self, *arguments: str, expect: int = 0) -> str:
        """What the command printed, on whichever stream."""
        ended = subprocess.run(
            self.command(*arguments),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == expect, ended.stdout
        return ended.stdout

    def parts(self) -> dict[str, dict[str, Any]]:
        shown = json.loads(self.halfrate("status", "--json"))
        return {part["name"]: part for part in shown["parts"]}

    def pids(self) -> dict[str, int]:
        return {name: part["pid"] for name, part in self.parts().items()}

    def client_env(self) -> dict[str, str]:
        lines = self.home.client_env.read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def answers_its_client(self) -> bool:
        env = self.client_env()
        request = urllib.request.Request(  # noqa: S310 - on this machine
            f"{env['OPENAI_BASE_URL']}/models",
            headers={"Authorization": f"Bearer {env['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310 - as above
            models = json.load(reply)["data"]
            return reply.status == HTTPStatus.OK and [m["id"] for m in models] == ["stub-embed"]


def stack_in(folder: Path) -> Stack:
    catalog = folder / "models.toml"
    catalog.write_text(CATALOG)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - for a child
    home = folder / LONG / LONG / "home"
    return Stack(Home.at(home), {**inherited, "HALFRATE_CATALOG": str(catalog)})


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = stack_in(tmp_path_factory.mktemp("up"))
    made.halfrate("up", "--detach")
    yield made
    made.halfrate("down")
    assert_nothing_is_left(made)


def assert_nothing_is_left(stack: Stack) -> None:
    record = read_record(stack.home)
    assert holder(stack.home) is None
    assert leftovers(stack.home.root) == []
    assert all(is_free(part.port) for part in record.parts if part.port)
    assert not [path for path in outside_files(record) if path.exists()]
    assert list(stack.home.temporary.iterdir()) == []


def until(what: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.1)


def test_status_names_every_part_and_its_own_process(stack: Stack) -> None:
    parts = stack.parts()

    assert list(parts) == PARTS
    assert {part["state"] for part in parts.values()} == {"running"}
    assert {part["restarts"] for part in parts.values()} == {0}
    assert len({part["pid"] for part in parts.values()}) == len(PARTS)
    words = {name: psutil.Process(part["pid"]).cmdline() for name, part in parts.items()}
    assert "postgres" in words["postgres"][0]
    assert words["api"][-2:] == ["run", "api"]
    assert "beat" in words["beat"]
    assert "engine.stub-embed" in words["engine.stub-embed"]
    assert {name for name, part in parts.items() if part["port"]} == set(PARTS[:4])


def test_client_env_is_all_that_a_client_needs(stack: Stack) -> None:
    assert stack.answers_its_client()
    sourced = subprocess.run(
        ["/bin/sh", "-c", 'set -a; . "$1"; env', "sh", str(stack.home.client_env)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(stack.client_env().items()) <= {
        (line.partition("=")[0], line.partition("=")[2]) for line in sourced.stdout.splitlines()
    }


def test_what_holds_a_secret_is_its_owners_alone(stack: Stack) -> None:
    record = read_record(stack.home)
    secret = [
        record.environment["HALFRATE_S3_SECRET_ACCESS_KEY"],
        json.loads(stack.home.secrets.read_text())["postgres"],
        json.loads(stack.home.secrets.read_text())["valkey"],
        stack.client_env()["OPENAI_API_KEY"],
    ]
    arguments = [" ".join(process.cmdline()) for process in leftovers(stack.home.root)]
    files = [file for file in stack.home.root.rglob("*") if file.is_file()]
    holding = [file for file in files if any(word.encode() in file.read_bytes() for word in secret)]

    assert not [word for word in secret if any(word in text for text in arguments)]
    assert {stack.home.record, stack.home.client_env, stack.home.secrets} <= set(holding)
    assert {stat.S_IMODE(file.stat().st_mode) for file in holding} == {0o600}
    assert not [file for file in holding if file.suffix == ".log"]


def test_nothing_listens_beyond_this_machine(stack: Stack) -> None:
    heard = {
        connection.laddr.ip
        for process in leftovers(stack.home.root)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }

    assert heard == {LOOPBACK}


def test_a_second_up_says_where_the_first_one_runs(stack: Stack) -> None:
    before = stack.pids()
    url = stack.client_env()["OPENAI_BASE_URL"].removesuffix("/v1")

    assert f"already runs in {stack.home.root} at {url}" in stack.halfrate("up", expect=1)
    assert f"is already up at {url}" in stack.halfrate("up", "--detach")
    assert stack.pids() == before


def test_keys_are_made_listed_and_revoked_in_the_running_stack(stack: Stack) -> None:
    made = stack.halfrate("key", "create", "--name=second", "--right=read")
    key = next(line for line in made.splitlines() if line.startswith("sk-"))
    listed = next(line for line in stack.halfrate("key", "list").splitlines() if "second" in line)

    assert key not in listed
    assert "read" in listed
    assert "revoked" in stack.halfrate("key", "revoke", listed.split()[0])
    assert "revoked" in next(
        line for line in stack.halfrate("key", "list").splitlines() if "second" in line
    )
    assert stack.answers_its_client()


@pytest.mark.parametrize("name", ["valkey", "beat"])
def test_a_part_that_is_killed_is_started_again_and_counted(stack: Stack, name: str) -> None:
    before = stack.pids()
    os.kill(before[name], signal.SIGKILL)

    until(lambda: stack.parts()[name]["restarts"] == 1)
    until(lambda: stack.parts()[name]["state"] == "running")

    after = stack.pids()
    assert after[name] != before[name]
    assert {other for other in PARTS if after[other] != before[other]} == {name}
    log = stack.home.root / "logs" / f"{name}.log"
    assert f"{name} ended with -9. The end of {log}:" in stack.home.up_log.read_text()


def test_two_homes_do_not_disturb_each_other(stack: Stack, tmp_path: Path) -> None:
    """The other one loses its supervisor, and `down` ends what is left of it."""
    before = stack.pids()
    other = stack_in(tmp_path)
    other.halfrate("up", "--detach")
    assert other.answers_its_client()
    supervisor = holder(other.home)
    assert supervisor is not None

    os.kill(supervisor, signal.SIGKILL)
    until(lambda: holder(other.home) is None)
    assert {part["state"] for part in other.parts().values()} == {"running"}

    assert "lost its supervisor" in other.halfrate("down")
    assert_nothing_is_left(other)
    assert {part["state"] for part in other.parts().values()} == {"stopped"}
    assert "does not run" in other.halfrate("down")
    assert stack.pids() == before
    assert stack.answers_its_client()


def test_a_stack_whose_supervisor_was_killed_is_taken_over_and_ends_in_order(stack: Stack) -> None:
    before = stack.pids()
    env = stack.client_env()
    supervisor = holder(stack.home)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: holder(stack.home) is None)

    with subprocess.Popen(
        stack.command("up"),
        cwd=ROOT,
        env=stack.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        until(lambda: process.poll() is not None or _is_ready(stack, process.pid))
        assert stack.answers_its_client()
        assert stack.client_env() == env
        assert not set(stack.pids().values()) & set(before.values())

        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)

    assert process.returncode == 0, said
    assert "processes that an earlier stack of this home left behind" in said
    assert_nothing_is_left(stack)


def _is_ready(stack: Stack, supervisor: int) -> bool:
    record = read_record(stack.home)
    return record.ready and record.supervisor == supervisor
