"""Do `halfrate backup` and `halfrate restore` bring a whole home to another place, and harm none?

One story on three homes, in the order in which it goes; what a backup holds is in test_backup.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from service.stack.home import Home, holder
from service.stack.sweep import leftovers
from tests.pipeline import embedding_line

ROOT = Path(__file__).parents[2]
CATALOG = """
[[models]]
id = "stub-embed"
kind = "embed"
source = "stub:"
price_input = 0.02

[[models]]
id = "stub-other"
kind = "embed"
source = "stub:"
price_input = 0.02
"""
NUMBER = 40


@dataclass
class Story:
    """What the tests before have left."""

    folder: Path
    key: str = ""
    answered: str = ""  # id of the output file of a batch that had ended
    content: bytes = b""
    open: str = ""  # id of a batch half of whose lines were answered
    homes: list[Path] = field(default_factory=list)

    def halfrate(self, home: Path, *arguments: str, expect: int = 0) -> str:
        """What the command printed, on whichever stream."""
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - for a child
        if home not in self.homes:
            self.homes.append(home)
        ended = subprocess.run(
            [sys.executable, "-m", "service.cli.main", *arguments, f"--home={home}"],
            cwd=ROOT,
            env={
                **inherited,
                "HALFRATE_CATALOG": str(self.folder / "models.toml"),
                "HALFRATE_FLUSH_S": "0.2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == expect, ended.stdout
        assert "Traceback" not in ended.stdout
        return ended.stdout

    def client(self, home: Path) -> openai.OpenAI:
        """The official client, with the key that the first home gave out."""
        lines = (home / "client.env").read_text(encoding="utf-8").splitlines()
        env = dict(line.partition("=")[::2] for line in lines)
        self.key = self.key or env["OPENAI_API_KEY"]
        return openai.OpenAI(base_url=env["OPENAI_BASE_URL"], api_key=self.key)

    @property
    def backup(self) -> Path:
        return self.folder / "backups" / "first"

    @property
    def first(self) -> Path:
        return self.folder / "first"

    @property
    def second(self) -> Path:
        return self.folder / "second"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    made = Story(tmp_path_factory.mktemp("backup"))
    (made.folder / "models.toml").write_text(CATALOG, encoding="utf-8")
    yield made
    for home in made.homes:
        made.halfrate(home, "down")
        assert leftovers(Home.at(home).root) == []


def submit(client: openai.OpenAI, lines: list[bytes]) -> str:
    data = b"\n".join(lines) + b"\n"
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    ).id


def until(client: openai.OpenAI, batch_id: str, holds: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 90
    while not holds(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    return batch


def test_a_running_stack_is_backed_up_with_a_batch_in_its_middle(story: Story) -> None:
    """The lines of a model that nobody serves keep the batch open."""
    story.halfrate(story.first, "up", "--detach", "--serve=stub-embed")
    with story.client(story.first) as client:
        done = submit(client, [embedding_line(f"{n}") for n in range(NUMBER)])
        batch = until(client, done, lambda batch: batch.status == "completed")
        assert batch.output_file_id is not None
        story.answered = batch.output_file_id
        story.content = client.files.content(story.answered).read()
        models = ("stub-embed", "stub-other")
        lines = [embedding_line(f"{n}", f"text {n}", models[n % 2]) for n in range(NUMBER)]
        story.open = submit(client, lines)
        until(
            client,
            story.open,
            lambda batch: (
                batch.request_counts is not None and batch.request_counts.completed == NUMBER // 2
            ),
        )

    said = story.halfrate(story.first, "backup", str(story.backup))

    assert "holds the state of" in said
    assert "their bytes" in said
    manifest = json.loads((story.backup / "manifest.json").read_text(encoding="utf-8"))
    # Two inputs, one output, and the parts of the open batch.
    assert manifest["objects"] > 3
    assert manifest["missing"] == 0
    assert "there already" in story.halfrate(story.first, "backup", str(story.backup), expect=1)
    assert [path.name for path in story.backup.parent.iterdir()] == ["first"]


def test_a_backup_goes_into_no_home_that_runs_or_holds_data(story: Story) -> None:
    said = story.halfrate(story.first, "restore", str(story.backup), expect=1)
    assert "`halfrate down` first" in said
    said = story.halfrate(story.first, "restore", str(story.backup), "--replace", expect=1)
    assert "`halfrate down` first" in said

    story.halfrate(story.first, "down")
    said = story.halfrate(story.first, "restore", str(story.backup), expect=1)
    assert "holds data" in said
    assert "--replace" in said


def test_in_a_fresh_home_the_batch_goes_on_and_the_files_are_there(story: Story) -> None:
    said = story.halfrate(story.second, "restore", str(story.backup))
    assert f"halfrate up --home {story.second}" in said
    assert {path.name for path in story.second.iterdir()} >= {"postgres", "seaweedfs"}
    assert not (story.second / "restoring").exists()
    assert holder(Home.at(story.second)) is None

    story.halfrate(story.second, "up", "--detach")
    with story.client(story.second) as client:
        assert client.files.content(story.answered).read() == story.content
        batch = until(client, story.open, lambda batch: batch.status == "completed")
        assert batch.output_file_id is not None
        output = client.files.content(batch.output_file_id).read().splitlines()
    assert [json.loads(line)["custom_id"] for line in output] == [f"{n}" for n in range(NUMBER)]
    assert "All is well" in story.halfrate(story.second, "doctor")


def test_a_stack_that_is_down_is_backed_up_and_replaced_where_that_is_said(story: Story) -> None:
    """The second home's later state goes into the first one, in place of its own; the state alone
    then once more, beside the bytes that came with it."""
    later, state = story.folder / "backups" / "later", story.folder / "backups" / "state"
    story.halfrate(story.second, "down")
    story.halfrate(story.second, "backup", str(later))
    assert leftovers(Home.at(story.second).root) == []

    story.halfrate(story.first, "restore", str(later), "--replace")
    assert "only their list" in story.halfrate(story.first, "backup", str(state), "--state-only")
    story.halfrate(story.first, "restore", str(state), "--replace")

    assert not (story.first / "replaced").exists()
    story.halfrate(story.first, "up", "--detach", "--serve=stub-embed")
    with story.client(story.first) as client:
        assert client.batches.retrieve(story.open).status == "completed"
        assert client.files.content(story.answered).read() == story.content


def test_the_state_alone_goes_into_no_home_without_its_bytes(story: Story) -> None:
    fresh, state = story.folder / "third", story.folder / "backups" / "state"
    assert "holds none" in story.halfrate(fresh, "restore", str(state), expect=1)
    assert not (fresh / "postgres").exists()


def test_there_is_nothing_to_back_up_in_a_home_without_data(story: Story) -> None:
    none = story.folder / "none"
    assert "nothing to back up" in story.halfrate(
        none, "backup", str(story.folder / "backups" / "none"), expect=1
    )
    assert not none.exists()
