"""What do end-to-end tests stand on? A whole stack, started by the command, on real models."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

HALFRATE = Path(sys.executable).with_name("halfrate")
QUICK = {
    # A killed worker's claims fall soon, so that the tests need not wait half a minute for it.
    "HALFRATE_LEASE_S": "4",
    "HALFRATE_RENEW_S": "1",
    "HALFRATE_FLUSH_S": "1",
    "HALFRATE_SHARD_S": "1",
}


@dataclass(frozen=True)
class Stack:
    """One home whose stack is up."""

    home: Path
    environment: dict[str, str]

    def halfrate(self, *arguments: str) -> str:
        """Run the command on this home; what it printed."""
        return subprocess.run(
            [str(HALFRATE), *arguments, "--home", str(self.home)],
            env=self.environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
        ).stdout

    def part(self, name: str) -> dict[str, Any]:
        """What `halfrate status` says of one part."""
        parts = json.loads(self.halfrate("status", "--json"))["parts"]
        return next(part for part in parts if part["name"] == name)

    def client(self) -> openai.OpenAI:
        """The official client, as client.env sets it up."""
        lines = (self.home / "client.env").read_text(encoding="utf-8").splitlines()
        env = dict(line.partition("=")[::2] for line in lines)
        return openai.OpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"])


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of its own, from `up` to `down`."""
    home = tmp_path_factory.mktemp("e2e") / "home"
    environment = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 - handed on to the command
        if not name.startswith("HALFRATE_") or name == "HALFRATE_MODELS"
    }
    running = Stack(home, {**environment, **QUICK})
    try:
        running.halfrate("up", "--detach")
        yield running
    finally:
        running.halfrate("down")


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    """The official client on the stack."""
    with stack.client() as opened:
        yield opened
