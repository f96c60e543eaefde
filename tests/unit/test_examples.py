"""Are the example files what they claim to be, and does the demo notice a wrong result?"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch

from examples import demo
from service.lines import ValidLine, check_line

HERE = Path(demo.__file__).parent
FILES = ["embeddings.jsonl", "tagging.jsonl"]
LABELS = {"order", "return", "repair", "sizing", "advice", "praise"}
MOST_BYTES = 8_192  # far below the service's cap of a line


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_bytes().decode("utf-8").splitlines()]


def texts() -> list[str]:
    return [line["body"]["input"] for line in lines("embeddings.jsonl")]


def messages() -> list[str]:
    return [line["body"]["messages"][-1]["content"] for line in lines("tagging.jsonl")]


def words(some: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in some]


def test_there_are_enough_lines_to_show_something() -> None:
    assert len(lines("embeddings.jsonl")) >= 300
    assert len(lines("tagging.jsonl")) >= 100


@pytest.mark.parametrize("name", FILES)
def test_every_line_passes_the_checks_of_the_service(name: str) -> None:
    endpoint = {example.input.name: example.endpoint for example in demo.examples(Path())}[name]
    served = {
        "embeddings.jsonl": "all-minilm-l6-v2",
        "tagging.jsonl": "smollm2-135m-instruct",
    }[name]
    for number, raw in enumerate((HERE / name).read_bytes().splitlines(), start=1):
        found = check_line(
            raw, line=number, endpoint=endpoint, serves=lambda model: model == served
        )
        assert isinstance(found, ValidLine), found


@pytest.mark.parametrize("name", FILES)
def test_every_custom_id_is_unique(name: str) -> None:
    ids = [line["custom_id"] for line in lines(name)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", FILES)
def test_lines_are_plain_and_short(name: str) -> None:
    content = (HERE / name).read_bytes()
    assert content.endswith(b"\n")
    assert b"\r" not in content
    assert not content.startswith(b"\xef\xbb\xbf")
    assert all(0 < len(line) <= MOST_BYTES for line in content.splitlines())


def test_every_text_is_different() -> None:
    assert len({text.casefold() for text in texts()}) == len(texts())
    assert len({message.casefold() for message in messages()}) == len(messages())


def test_the_texts_are_ragged() -> None:
    counts = words(texts())
    assert 3 <= statistics.quantiles(counts, n=20)[0] <= 10
    assert max(counts) >= 120
    assert statistics.stdev(counts) > 0.6 * statistics.mean(counts)
    assert len(set(counts)) > 60


def test_the_texts_fit_the_model() -> None:
    # The model takes 256 tokens. Across these texts a token has four characters and more, less
    # where the script is not Latin: there every character may be one.
    assert max(len(text) for text in texts()) < 1_000
    assert all(len(text) < 200 for text in texts() if not text.isascii() and "。" in text)


def test_some_texts_are_not_ascii() -> None:
    joined = "".join(texts())
    assert {"€", "ü", "é", "¿", "軽"} <= set(joined)


def test_the_messages_are_ragged() -> None:
    counts = words(messages())
    assert min(counts) < 12
    assert max(counts) > 50


def test_all_messages_share_one_prompt_that_names_the_labels() -> None:
    prompts = {json.dumps(line["body"]["messages"][:-1]) for line in lines("tagging.jsonl")}
    assert len(prompts) == 1
    system, *turns = json.loads(prompts.pop())
    assert system["role"] == "system"
    assert all(f"\n{label}: " in system["content"] for label in LABELS)
    assert {turn["content"] for turn in turns if turn["role"] == "assistant"} == LABELS


def test_tags_are_short_and_greedy() -> None:
    for line in lines("tagging.jsonl"):
        assert line["body"]["messages"][-1]["role"] == "user"
        assert 4 <= line["body"]["max_tokens"] <= 6
        assert line["body"]["temperature"] == 0


def test_a_complete_result_in_order_has_no_faults() -> None:
    assert demo.faults(["a", "b", "c"], ["a", "c"], ["b"]) == []


def test_a_missing_line_is_a_fault() -> None:
    assert demo.faults(["a", "b", "c"], ["a", "c"], []) == ["b is missing"]


def test_a_line_answered_twice_is_a_fault() -> None:
    assert demo.faults(["a", "b"], ["a", "a", "b"], []) == ["a stands 2 times"]
    assert demo.faults(["a", "b"], ["a", "b"], ["b"]) == ["b stands 2 times"]


def test_swapped_lines_are_a_fault() -> None:
    assert demo.faults(["a", "b"], ["b", "a"], []) == ["the output is not in input order"]
    assert demo.faults(["a", "b"], [], ["b", "a"]) == ["the error file is not in input order"]


def test_a_line_that_nobody_asked_for_is_a_fault() -> None:
    assert demo.faults(["a"], ["a", "z"], []) == ["z was not asked for"]


def outcome(folder: Path, batch: Batch, results: dict[str, list[str]]) -> demo.Outcome:
    for name, ids in results.items():
        text = "".join(json.dumps({"custom_id": custom_id}) + "\n" for custom_id in ids)
        (folder / name).write_text(text)
    example = demo.Example(
        "small", "/v1/embeddings", folder / "in", folder / "output", folder / "errors"
    )
    return demo.Outcome(example, batch, 1.0)


def a_batch(**fields: object) -> Batch:
    return Batch.model_validate(
        {
            "id": "batch_1",
            "completion_window": "24h",
            "created_at": 1,
            "endpoint": "/v1/embeddings",
            "input_file_id": "file-1",
            "object": "batch",
            "status": "completed",
            **fields,
        }
    )


def test_a_batch_with_every_line_answered_passes(tmp_path: Path) -> None:
    demo.check(outcome(tmp_path, a_batch(), {"in": ["a", "b"], "output": ["a", "b"]}))


def test_a_batch_with_a_failed_line_does_not_pass(tmp_path: Path) -> None:
    results = {"in": ["a", "b"], "output": ["a"], "errors": ["b"]}
    with pytest.raises(demo.DemoError, match="1 line failed"):
        demo.check(outcome(tmp_path, a_batch(), results))


def test_a_batch_without_output_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoError, match="a is missing"):
        demo.check(outcome(tmp_path, a_batch(), {"in": ["a"]}))


@pytest.mark.parametrize("status", ["failed", "expired", "cancelled"])
def test_a_batch_that_did_not_complete_does_not_pass(tmp_path: Path, status: str) -> None:
    batch = a_batch(status=status, errors={"data": [{"message": "Line 3 is bad."}]})
    with pytest.raises(demo.DemoError, match=f"ended {status}. Line 3 is bad."):
        demo.check(outcome(tmp_path, batch, {"in": ["a"], "output": ["a"]}))


def test_the_results_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    chosen = demo.examples(tmp_path / "out")
    demo.clear(chosen)
    for example in chosen:
        example.output.write_text("old")
        example.errors.write_text("old")
    demo.clear(chosen)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_nearest_neighbour_is_the_one_with_the_smallest_angle() -> None:
    vectors = [[1.0, 0.0], [0.0, 5.0], [9.0, 1.0], [-1.0, 0.0]]
    index, cosine = demo.nearest(vectors, 0)
    assert index == 2
    assert cosine == pytest.approx(9 / 82**0.5)


def test_the_price_is_read_from_what_the_service_adds_to_a_batch() -> None:
    cost = {"currency": "USD", "standard": "0.0012", "paid": "0.0006", "saved": "0.0006"}
    assert demo.cost_of(a_batch(halfrate={"cost": cost})) == cost


@pytest.mark.parametrize(
    "text",
    [
        "OPENAI_BASE_URL=http://127.0.0.1:9/v1\nOPENAI_API_KEY=sk-1=\n",
        "# made by up\nexport OPENAI_BASE_URL='http://127.0.0.1:9/v1'\nOPENAI_API_KEY=\"sk-1=\"",
    ],
)
def test_a_client_env_is_read_as_a_shell_would(text: str) -> None:
    assert demo.read_client_env(text) == {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "sk-1=",
    }


def test_nothing_waits_beyond_the_deadline() -> None:
    with pytest.raises(demo.DemoError, match="out of time"):
        demo.left(0.0)
