"""Does every file of tests/cases come to what its expected.json says?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.batch import BatchStatus
from service.stack.parts import EmbeddedUrls
from tests import invariants
from tests.integration.api_server import Server, api_server
from tests.pipeline import MODELS, Pipeline

CASES = Path(__file__).parents[1] / "cases"


@dataclass(frozen=True)
class Case:
    """One entry of an expected.json."""

    file: Path
    expected: dict[str, Any]


def cases(folder: Path, *, upload: int | None = 200) -> list[Any]:
    """Those whose upload is answered so; None: all."""
    entries = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return [
        pytest.param(Case(folder / f"{name}.jsonl", expected), id=name)
        for name, expected in entries.items()
        if upload in (None, expected["upload"])
    ]


@pytest.mark.parametrize("case", [*cases(CASES), *cases(CASES / "more")])
def test_a_case_comes_to_what_is_expected(pipeline: Pipeline, case: Case) -> None:
    expected = case.expected
    batch_id = pipeline.submit(case.file.read_bytes(), endpoint=expected["endpoint"])
    pipeline.run("all-minilm-l6-v2", "smollm2-135m-instruct")
    batch = pipeline.batch(batch_id)
    found = [(error["line"], error["code"], error["param"]) for error in batch.errors or []]
    assert batch.status == expected["status"], found
    for line, code, param in expected["errors"]:
        assert any((line, code) == each[:2] and param in (None, each[2]) for each in found), (
            line,
            code,
            param,
            found,
        )
    if batch.status is BatchStatus.FAILED:
        # Nothing but the bad lines is told, in line order, and nothing is left of the others.
        assert len(found) == batch.error_count
        assert {line for line, _, _ in found} == {line for line, _, _ in expected["errors"]}
        assert [line for line, _, _ in found] == sorted(line or 0 for line, _, _ in found) or (
            found[0][0] is None
        )
        assert pipeline.line_rows(batch_id) == []
        assert (batch.total, batch.output_file_id, batch.error_file_id) == (0, None, None)
        return
    invariants.check(pipeline, batch_id)
    output, errors = pipeline.output(batch_id), pipeline.errors(batch_id)
    assert sorted(line["custom_id"] for line in output) == sorted(expected["succeeded"])
    assert sorted(line["custom_id"] for line in errors) == sorted(expected["failed"])
    assert {line["response"]["status_code"] for line in errors} <= {400}
    for line in errors:
        error = line["response"]["body"]["error"]
        assert error["message"]
        for name in ("param", "code"):
            wanted = expected.get(name, {}).get(line["custom_id"], error[name])
            assert error[name] == wanted, (line["custom_id"], error)


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The API, for what happens at the door."""
    path = tmp_path_factory.mktemp("cases") / "models.toml"
    path.write_text(MODELS, encoding="utf-8")
    with api_server(urls, path) as running:
        yield running


@pytest.mark.parametrize("case", [*cases(CASES, upload=None), *cases(CASES / "more", upload=None)])
def test_the_upload_of_a_case_is_taken_or_refused(server: Server, case: Case) -> None:
    name, data = case.expected["filename"], case.file.read_bytes()
    api = server.project()
    reply = api.post_file(files={"file": (name, data)}, data={"purpose": "batch"})
    assert reply.status_code == case.expected["upload"], reply.text
    if reply.status_code == 200:
        assert reply.json()["bytes"] == len(data)
        with api.http() as http:
            assert http.get(f"/v1/files/{reply.json()['id']}/content").content == data
    else:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
