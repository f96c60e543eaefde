"""Does a line to classify, score, rerank or moderate go the whole way, on models of every kind?"""

from typing import Any

import orjson
import pytest
from openai.types import CreateEmbeddingResponse, ModerationCreateResponse

from engine.stub import DIMENSIONS, StubTokenizer
from service.batch import BatchStatus
from service.catalog import Category
from tests import invariants
from tests.pipeline import Pipeline
from tests.typed import exactly

ENCODERS = ("stub-small", "stub-classify", "stub-tags", "stub-score")
LABELS = ["negative", "neutral", "positive"]
TOO_LONG = "x" * 100


def run(pipeline: Pipeline, endpoint: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """What output and error file hold for these bodies, in their order."""
    lines = [
        orjson.dumps({"custom_id": str(n), "method": "POST", "url": endpoint, "body": body})
        for n, body in enumerate(bodies)
    ]
    batch_id = pipeline.submit(lines, endpoint=endpoint)
    pipeline.run(*ENCODERS)
    assert pipeline.batch(batch_id).status == BatchStatus.COMPLETED
    invariants.check(pipeline, batch_id)
    found = pipeline.output(batch_id) + pipeline.errors(batch_id)
    return [
        line["response"]["body"] for line in sorted(found, key=lambda line: int(line["custom_id"]))
    ]


def errors(pipeline: Pipeline, endpoint: str, *bodies: dict[str, Any]) -> list[tuple[str, str]]:
    """Param and code of each body's error."""
    return [
        (body["error"]["param"], body["error"]["code"]) for body in run(pipeline, endpoint, *bodies)
    ]


def test_a_trained_classifier_labels_texts(pipeline: Pipeline) -> None:
    common = {"model": "stub-classify"}
    one, many, tokens, cut = run(
        pipeline,
        "/v1/classify",
        {**common, "input": "good", "logits": True, "return_all_scores": True},
        {**common, "input": ["bad", "good"]},
        {**common, "input": StubTokenizer().encode(["good"])[0]},
        {**common, "input": ["good", TOO_LONG], "truncate": True},
    )
    [entry] = one["data"]
    assert list(entry["scores"]) == LABELS
    assert entry["label"] == max(entry["scores"], key=entry["scores"].__getitem__)
    assert entry["probs"] == list(entry["scores"].values())
    assert sum(entry["probs"]) == pytest.approx(1)
    assert len(entry["logits"]) == entry["num_classes"] == 3
    again = {name: entry[name] for name in ("label", "score", "probs", "num_classes")}
    assert many["data"][1] == {"index": 1, **again}
    assert tokens["data"] == [{"index": 0, **again}]
    assert one["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert cut["usage"] == {"prompt_tokens": 70, "total_tokens": 70, "truncated_tokens": 38}
    assert cut["data"][0] == {"index": 0, **again}


def test_any_embedding_model_labels_texts_by_names(pipeline: Pipeline) -> None:
    common = {"model": "stub-small", "templates": ["{}"], "return_all_scores": True}
    same, multi, cut = run(
        pipeline,
        "/v1/classify",
        {**common, "input": ["sport", "food"], "labels": ["food", "sport", "art"]},
        {**common, "input": "sport", "labels": ["food", "sport"], "multi_label": True},
        {**common, "input": TOO_LONG, "labels": ["food", "sport"], "truncate": True},
    )
    # The stub embeds equal texts alike, and others anyhow.
    assert [entry["label"] for entry in same["data"]] == ["sport", "food"]
    assert [sum(entry["probs"]) for entry in same["data"]] == pytest.approx([1, 1])
    assert multi["data"][0]["scores"]["sport"] == pytest.approx(1)
    assert same["usage"]["total_tokens"] == 7 + 6 + 6 + 7 + 5
    assert cut["usage"] == {"prompt_tokens": 77, "total_tokens": 77, "truncated_tokens": 38}


def test_names_are_found_anywhere_in_a_long_text(pipeline: Pipeline) -> None:
    text = "é " * 100 + "Zoë met Ada and " + "b " * 100 + "Bob"
    found, raw = run(
        pipeline,
        "/v1/classify",
        {"model": "stub-tags", "input": [text, "nobody"], "aggregation": "first", "overlap": 20},
        {"model": "stub-tags", "input": "Ada", "aggregation": "none"},
    )
    first, second = found["data"]
    assert [span["text"] for span in first["spans"]] == ["Zoë", "Ada", "Bob"]
    for span in first["spans"]:
        assert text[span["start"] : span["end"]] == span["text"]
        assert span["label"] == "NAME"
    assert second == {"index": 1, "spans": []}
    assert [span["text"] for span in raw["data"][0]["spans"]] == ["A", "d", "a"]
    assert raw["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("model", ["stub-score", "stub-small"])
def test_documents_are_ranked_as_their_scores_say(pipeline: Pipeline, model: str) -> None:
    documents = ["one", "two", "three", "one"]
    (scored,) = run(pipeline, "/v1/score", {"model": model, "text_1": "one", "text_2": documents})
    (pairwise,) = run(
        pipeline, "/v1/score", {"model": model, "queries": ["one"] * 4, "documents": documents}
    )
    assert [entry["object"] for entry in scored["data"]] == ["score"] * 4
    scores = [entry["score"] for entry in scored["data"]]
    assert [entry["score"] for entry in pairwise["data"]] == scores
    assert scores[0] == scores[3]
    whole, best = run(
        pipeline,
        "/v1/rerank",
        {"model": model, "query": "one", "documents": documents, "return_documents": True},
        {"model": model, "query": "one", "documents": [{"text": d} for d in documents], "top_n": 2},
    )
    ranked = sorted(range(4), key=lambda n: (-scores[n], n))
    assert whole["results"] == [
        {"index": n, "relevance_score": scores[n], "document": {"text": documents[n]}}
        for n in ranked
    ]
    assert best["results"] == [{"index": n, "relevance_score": scores[n]} for n in ranked[:2]]
    assert whole["usage"] == scored["usage"]


def test_a_moderation_flags_what_the_catalog_maps(pipeline: Pipeline) -> None:
    texts = [f"text {n}" for n in range(12)]
    (answer,) = run(pipeline, "/v1/moderations", {"model": "stub-classify", "input": texts})
    (plain,) = run(pipeline, "/v1/classify", {"model": "stub-classify", "input": texts})
    typed = exactly(ModerationCreateResponse, answer)
    negative = [entry["probs"][0] for entry in plain["data"]]
    assert [each.category_scores.harassment for each in typed.results] == negative
    flagged = [max(entry["probs"][:2]) >= 0.5 for entry in plain["data"]]
    assert [each.flagged for each in typed.results] == flagged
    assert {True, False} == set(flagged)
    assert set(answer["results"][0]["categories"]) == set(Category)


def test_vectors_are_cut_to_lengths_that_the_model_lists_and_to_no_others(
    pipeline: Pipeline,
) -> None:
    common = {"model": "stub-small", "input": "a"}
    whole, cut, refused = run(
        pipeline,
        "/v1/embeddings",
        {**common, "dimensions": DIMENSIONS},
        {**common, "dimensions": 4},
        {**common, "dimensions": 5},
    )
    (vector,) = exactly(CreateEmbeddingResponse, cut).data
    first = whole["data"][0]["embedding"][:4]
    length = sum(value**2 for value in first) ** 0.5
    assert vector.embedding == pytest.approx([value / length for value in first])
    error = refused["error"]
    assert (error["param"], error["code"]) == ("dimensions", "invalid_value")
    for size in ("4", "16", str(DIMENSIONS)):
        assert size in error["message"]


def test_a_prompt_changes_a_vector_as_its_text_would(pipeline: Pipeline) -> None:
    common = {"model": "stub-small"}
    prompted, written, refused, cut = run(
        pipeline,
        "/v1/embeddings",
        {**common, "input": "a", "prompt_name": "query"},
        {**common, "input": "search: a"},
        {**common, "input": "a", "prompt_name": "other"},
        {**common, "input": TOO_LONG, "prompt_name": "query", "truncate": True},
    )
    assert prompted["data"] == written["data"]
    assert prompted["usage"] == written["usage"]
    assert refused["error"]["param"] == "prompt_name"
    assert cut["usage"]["truncated_tokens"] == len("search: ") + 100 + 2 - 64


def test_what_is_too_long_fails_its_line_by_its_name_with_both_numbers(
    pipeline: Pipeline,
) -> None:
    score = {"model": "stub-score", "text_1": "a", "text_2": TOO_LONG}
    small = {"model": "stub-small"}
    code = "context_length_exceeded"
    assert errors(
        pipeline,
        "/v1/classify",
        {"model": "stub-classify", "input": ["a", TOO_LONG]},
        {**small, "input": TOO_LONG, "labels": ["a"]},
        {**small, "input": "a", "labels": [TOO_LONG]},
    ) == [("input", code), ("input", code), ("labels", code)]
    assert errors(
        pipeline, "/v1/score", score, {**small, "queries": TOO_LONG, "documents": "a"}
    ) == [("text_2", code), ("queries", code)]
    assert errors(
        pipeline, "/v1/rerank", {**small, "query": "a", "documents": ["b", TOO_LONG]}
    ) == [("documents", code)]
    (body,) = run(pipeline, "/v1/score", score)
    assert "64" in body["error"]["message"]
    assert "105" in body["error"]["message"]


def test_a_body_that_a_model_of_that_kind_cannot_answer_fails_its_line(
    pipeline: Pipeline,
) -> None:
    assert errors(
        pipeline,
        "/v1/classify",
        {"model": "stub-small", "input": "a"},
        {"model": "stub-classify", "input": "a", "labels": ["b"]},
        {"model": "stub-tags", "input": [1, 2]},
        {"model": "stub-tags", "input": "a", "overlap": 60},
        {"model": "stub-classify", "input": ""},
        {"model": "stub-classify", "input": ["a", ""]},
        {"model": "stub-classify", "input": [300]},
    ) == [
        ("labels", "missing_required_parameter"),
        ("labels", "unsupported_parameter"),
        ("input", "invalid_type"),
        ("overlap", "invalid_value"),
        ("input", "invalid_value"),
        ("input", "invalid_value"),
        ("input", "invalid_value"),
    ]


def test_a_line_without_what_it_is_about_fails_the_file(pipeline: Pipeline) -> None:
    lines = [
        orjson.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/score", "body": body})
        for n, body in enumerate(
            [
                {"model": "stub-score", "text_2": "a"},
                {"model": "stub-score", "queries": "a", "documents": None},
                {"model": "stub-classify", "text_1": "a", "text_2": "b"},
            ]
        )
    ]
    batch_id = pipeline.submit(lines, endpoint="/v1/score")
    pipeline.run(*ENCODERS)
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.FAILED
    assert [(error["code"], error["param"]) for error in batch.errors or []] == [
        ("missing_required_parameter", "body.text_1"),
        ("missing_required_parameter", "body.text_2"),
        ("model_not_found", "body.model"),
    ]


def test_lines_of_one_file_are_answered_by_models_of_all_kinds(pipeline: Pipeline) -> None:
    trained, named, tags = run(
        pipeline,
        "/v1/classify",
        {"model": "stub-classify", "input": "Ada"},
        {"model": "stub-small", "input": "Ada", "labels": ["b", "c"]},
        {"model": "stub-tags", "input": "Ada"},
    )
    assert [len(body["data"]) for body in (trained, named, tags)] == [1, 1, 1]
    assert trained["data"][0]["label"] in LABELS
    assert named["data"][0]["label"] in {"b", "c"}
    assert tags["data"][0]["spans"][0]["text"] == "Ada"
