"""Does `halfrate validate` find in every case what the service finds?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.catalog import Catalog
from service.cli.validate import Fails, Finding, findings
from service.settings import Limits
from tests.pipeline import MODELS, chat_line, embedding_line

CASES = Path(__file__).parents[1] / "cases"

# What only a tokenizer, or the loaded model, knows.
OF_THE_MODEL = {
    "one_line_too_long",
    "one_of_many_inputs_too_long",
    "token_beyond_the_vocabulary",
    "max_tokens_over_the_context",
    "parameters_not_honoured",
    "turns_of_every_kind",
    "dimensions_not_listed",
    "classify_of_every_shape",
    "scores_of_every_shape",
    "reranks_of_every_shape",
}


def cases() -> list[Any]:
    return [
        pytest.param(folder / f"{name}.jsonl", expected, id=name)
        for folder in (CASES, CASES / "more")
        for name, expected in json.loads((folder / "expected.json").read_text("utf-8")).items()
        if expected["upload"] == 200
    ]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(MODELS, encoding="utf-8")
    return path


def found_in(data: bytes, catalog: Path, endpoint: str = "/v1/embeddings", **limits: Any) -> Any:
    return list(
        findings([data], endpoint=endpoint, catalog=Catalog.load(catalog), limits=Limits(**limits))
    )


@pytest.mark.parametrize(("path", "expected"), cases())
def test_a_case_is_found_as_the_service_finds_it(
    path: Path, expected: dict[str, Any], catalog: Path
) -> None:
    data = path.read_bytes()
    found: list[Finding] = found_in(data, catalog, expected["endpoint"])
    of_file = [(each.line, each.code) for each in found if each.fails is Fails.FILE]
    assert sorted(of_file) == sorted((line, code) for line, code, _ in expected["errors"])
    if of_file:
        return
    rows = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    failed = {orjson.loads(rows[each.line - 1])["custom_id"]: each for each in found if each.line}
    missing = set(expected["failed"]) - set(failed)
    assert not missing or path.stem in OF_THE_MODEL
    assert set(failed) <= set(expected["failed"])
    for custom_id, each in failed.items():
        assert each.param == expected.get("param", {}).get(custom_id, each.param)
        assert each.code == expected.get("code", {}).get(custom_id, each.code)


def test_findings_come_in_line_order_whatever_they_cost(catalog: Path) -> None:
    rows = [chat_line("a", temperature=9), b"{", chat_line("a"), chat_line("b", top_kk=1)]
    found = found_in(b"\n".join(rows), catalog, "/v1/chat/completions")
    assert [(each.line, each.code, each.fails) for each in found] == [
        (1, "invalid_value", Fails.LINE),
        (2, "invalid_json_line", Fails.FILE),
        (3, "duplicate_custom_id", Fails.FILE),
        (4, "unknown_parameter", Fails.LINE),
    ]


def test_the_limits_are_those_of_the_settings(catalog: Path) -> None:
    rows = b"\n".join(embedding_line(str(n), ["a", "b"]) for n in range(3))
    assert found_in(rows, catalog) == []
    (found,) = found_in(rows, catalog, max_lines=2)
    assert (found.line, found.code) == (None, "too_many_lines")
    assert [each.code for each in found_in(rows, catalog, max_line_bytes=50)] == [
        "line_too_large"
    ] * 3
    assert [each.param for each in found_in(rows, catalog, max_inputs=1)] == ["input"] * 3


def command(catalog: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli.main", "validate", *arguments],
        cwd=Path(__file__).parents[2],
        env={"HALFRATE_CATALOG": str(catalog)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_prints_every_bad_line_and_exits_with_1(catalog: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([b"{", embedding_line("a"), embedding_line("b", "")]))
    ended = command(catalog, str(path), "--endpoint", "/v1/embeddings")
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == [
        "Line 1 (invalid_json_line): This line is not parseable as valid JSON.",
        "Line 3 (invalid_value, input): Invalid 'input': it must not be empty.",
        "2 faults. The batch would fail as a whole.",
    ]
    ended = command(catalog, str(path), "--endpoint", "/v1/embeddings", "--json")
    assert [json.loads(row)["fails"] for row in ended.stdout.splitlines()] == ["file", "line"]


def test_the_command_exits_with_0_where_nothing_is_wrong(catalog: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(embedding_line("a"))
    ended = command(catalog, str(path), "--endpoint", "/v1/embeddings")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("Nothing is wrong.")


def test_what_cannot_be_checked_is_told_in_one_line(catalog: Path, tmp_path: Path) -> None:
    for arguments in (
        (str(tmp_path / "none.jsonl"), "--endpoint", "/v1/embeddings"),
        (str(catalog), "--endpoint", "/v1/poems"),
    ):
        ended = command(catalog, *arguments)
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1
        assert "Traceback" not in ended.stderr
