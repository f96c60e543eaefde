"""Does every example of docs/api.md do what it says, and is every route on the page?"""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from service.api.models import LIVE_CALLS
from service.db.models import Right
from service.wake import Waker
from tests import parameters_table
from tests.integration.api_server import (
    Api,
    Server,
    app_over,
    document_of_nowhere,
    serving,
)
from tests.pipeline import Pipeline
from tests.receiver import Receiver, receiver
from worker import tick
from worker.resources import Resources

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
WEBHOOK_URL = "https://example.com/halfrate"
MODELS = ("all-minilm-l6-v2", "smollm2-135m-instruct")
REAL_CURL = shutil.which("curl")


def blocks(language: str, text: str = PAGE) -> list[str]:
    """The fenced examples in that language, in the page's order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to run examples in: they read ours and write their results."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture
def api(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A server that may call this machine, its address and key in the environment."""
    settings = resources.settings.model_copy(update={"webhook_private_addresses": True})
    with (
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
        serving(app_over(settings, resources.database, resources.storage, waker)) as url,
    ):
        api = Server(url, settings, resources.database, resources.storage).project()
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", api.other_key(Right.ADMIN))
        yield api


@pytest.fixture
def work(resources: Resources, api: Api) -> Callable[[], None]:
    """What the workers do meanwhile."""
    pipeline = Pipeline(resources, api.project_id)

    def do() -> None:
        pipeline.skip_waits()
        tick.tick(pipeline.resources)
        pipeline.run(*MODELS)

    return do


def test_the_python_examples_run_in_order(
    api: Api,
    work: Callable[[], None],
    hook: Receiver,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, sleep = threading.current_thread(), time.sleep

    def worked(seconds: float) -> None:
        """While the examples sleep, the service works."""
        if threading.current_thread() is main:
            work()
        else:
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", worked)
    names: dict[str, Any] = {"__name__": "docs"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, block in enumerate(blocks("python")):
            source = block.replace(WEBHOOK_URL, hook.url)
            exec(compile(source, f"docs/api.md, example {number}", "exec"), names)  # noqa: S102
        # The handler on the page reads what came.
        received = hook.received[0]
        names["received"](received.body, received.headers, names["webhook"].signing_secret)
    names["client"].close()
    assert (here / "results.jsonl").read_bytes().startswith(b'{"id":"batch_req_')
    told = said.getvalue()
    for word in ("validating", "completed", "cancelling", "batch_only", "batch.completed"):
        assert word in told


@pytest.mark.parametrize(
    "curl",
    [
        pytest.param([sys.executable, str(Path(__file__).with_name("stand_in_for_curl.py"))]),
        *([[REAL_CURL]] if REAL_CURL else []),
    ],
    ids=["stand-in", *(["curl"] if REAL_CURL else [])],
)
def test_the_curl_examples_run_in_order(
    api: Api,
    work: Callable[[], None],
    hook: Receiver,
    here: Path,
    curl: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for block in blocks("sh"):
        for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE)[1:]:
            if "batches/$BATCH -H" in command:
                work()
            run = command.replace("curl", shlex.join(curl), 1).replace(WEBHOOK_URL, hook.url)
            ended = subprocess.run(
                ["sh", "-euc", run],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            assert ended.stderr == ""
            if "-o " in command:
                continue
            reply = json.loads(ended.stdout)
            refused = command.rstrip().endswith("# 404")
            assert ("error" in reply and reply.get("object") is None) == refused, reply
            for name, value in variables(reply):
                monkeypatch.setenv(name, value)
    assert (here / "results.jsonl").read_bytes().startswith(b'{"id":"batch_req_')
    assert len(hook.received) == 1


def variables(reply: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `$FILE`, `$BATCH` … stand for after this reply."""
    names = {
        "file": "FILE",
        "batch": "BATCH",
        "upload": "UPLOAD",
        "upload.part": "PART",
        "webhook_endpoint": "WEBHOOK",
    }
    name = names.get(str(reply.get("object")))
    if name is not None and "id" in reply:
        yield name, reply["id"]
    if reply.get("output_file_id"):
        yield "OUTPUT", reply["output_file_id"]


def routes() -> list[str]:
    """Of the OpenAPI document: `GET /v1/files` …"""
    return [
        f"{method.upper()} {path}"
        for path, methods in document_of_nowhere()["paths"].items()
        for method in methods
    ]


@pytest.mark.parametrize("route", routes())
def test_a_route_has_its_section_with_both_examples(route: str) -> None:
    method, path = route.split(" ")
    if path.startswith("/health/"):
        assert f"`{route}`" in section("## Health")
    elif path == "/metrics":
        assert f"`{route}`" in section("## Metrics")
    elif route in {f"POST {each}" for each in LIVE_CALLS}:
        assert f"{path}`" in section("## Live calls")
    else:
        assert blocks("python", section(f"### {method} {path}"))
        assert blocks("sh", section(f"### {method} {path}"))


def section(heading: str) -> str:
    """What stands under that heading."""
    assert f"{heading}\n" in PAGE
    return re.split(r"^##", PAGE.split(f"{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_no_section_is_about_a_route_that_there_is_not() -> None:
    headings = re.findall(r"^### ([A-Z]+ /\S+)$", PAGE, re.MULTILINE)
    assert set(headings) <= set(routes())


def test_the_page_has_the_table_of_all_parameters() -> None:
    found = re.search(r"<!-- parameters -->\n(.*?)\n<!-- /parameters -->", PAGE, re.DOTALL)
    assert found
    # Printed by `python -m tests.parameters_table`, to be pasted between the two marks.
    assert found[1].splitlines() == parameters_table.table().splitlines()
