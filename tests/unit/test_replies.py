"""Do answers to classify, score, rerank and moderate say what the model said?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import ModerationCreateResponse

from engine.request import Classification, Embedding, Encoded, EncodeRequest
from engine.stub import StubTokenizer
from service.bodies.check import InvalidBody, Rules
from service.catalog import Category, Model, ModelKind, Moderation
from tests.typed import exactly
from worker import prompts
from worker.answers import Answered, answered, response_line
from worker.prompts import Prompt
from worker.replies.classify import SCALE

RULES = Rules(max_inputs=10)
LABELS = ("calm", "rude", "vile")
MAPPING = Moderation(
    labels={"rude": Category.HARASSMENT, "vile": Category.HARASSMENT},
    thresholds={Category.HATE: 0.0},
)
PROMPTS = {"query": "Q: ", "passage": "P: "}


def prompt_of(
    endpoint: str,
    kind: ModelKind,
    *,
    tokenizer: StubTokenizer | None = None,
    moderation: Moderation | None = None,
    **body: Any,
) -> Prompt:
    model = Model(
        id="m",
        kind=kind,
        source="stub:",
        price_input="1",
        context_length=32,
        moderation=moderation,
    )
    return prompts.read(
        {"model": "m", **body},
        endpoint=endpoint,
        model=model,
        tokenizer=tokenizer or StubTokenizer(),
        rules=RULES,
    )


def texts_of(prompt: Prompt) -> list[str]:
    """What the engine is asked to read."""
    found = []
    for request in prompts.requests(prompt, key="k"):
        assert isinstance(request, EncodeRequest)
        found.append(StubTokenizer().decode(request.tokens))
    return found


def body_of(prompt: Prompt, results: Sequence[Encoded], labels: Sequence[str] = LABELS) -> Any:
    line = response_line(answer_of(prompt, results, labels))
    return orjson.loads(line)["response"]["body"]


def answer_of(prompt: Prompt, results: Sequence[Encoded], labels: Sequence[str] = ()) -> Answered:
    return answered(1, "c", prompt, results, labels=labels, created=7)


def scored(*rows: list[float]) -> list[Classification]:
    return [
        Classification(n, np.array(row, np.float32) * 2, np.array(row, np.float32), 3)
        for n, row in enumerate(rows)
    ]


def vectors(*rows: list[float]) -> list[Embedding]:
    return [Embedding(n, np.array(row, np.float32), 3) for n, row in enumerate(rows)]


def test_a_classification_is_vllms_object() -> None:
    prompt = prompt_of("/v1/classify", ModelKind.CLASSIFY, input=["ab", "c"])
    body = body_of(prompt, scored([0.1, 0.7, 0.2], [0.5, 0.25, 0.25]))
    assert body.pop("id").startswith("classify-")
    assert body == {
        "object": "list",
        "created": 7,
        "model": "m",
        "data": [
            {
                "index": 0,
                "label": "rude",
                "score": 0.7,
                "probs": [0.1, 0.7, 0.2],
                "num_classes": 3,
            },
            {
                "index": 1,
                "label": "calm",
                "score": 0.5,
                "probs": [0.5, 0.25, 0.25],
                "num_classes": 3,
            },
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_all_scores_and_logits_are_told_on_request() -> None:
    prompt = prompt_of(
        "/v1/classify", ModelKind.CLASSIFY, input="a", return_all_scores=True, logits=True
    )
    [entry] = body_of(prompt, scored([0.5, 0.25, 0.125]))["data"]
    assert entry["scores"] == {"calm": 0.5, "rude": 0.25, "vile": 0.125}
    assert entry["logits"] == [1, 0.5, 0.25]


def zero_shot(**body: Any) -> Prompt:
    return prompt_of("/v1/classify", ModelKind.EMBED, **body)


def test_texts_are_compared_with_the_mean_of_a_labels_templates() -> None:
    prompt = zero_shot(
        input=["a", "b"],
        labels=["x", "y"],
        templates=["{}!", "{}?"],
        multi_label=True,
        return_all_scores=True,
        logits=True,
    )
    assert texts_of(prompt) == ["a", "b", "x!", "x?", "y!", "y?"]
    # The lengths of vectors say nothing.
    results = vectors([2, 0], [0, -1], [3, 0], [0, 5], [-1, 0], [-7, 0])
    first, second = body_of(prompt, results)["data"]
    half = np.float32(np.sqrt(0.5))
    assert first["logits"] == pytest.approx([half, -1])
    assert first["scores"] == pytest.approx({"x": half, "y": 0})
    assert (first["label"], first["num_classes"]) == ("x", 2)
    assert second["logits"] == pytest.approx([-half, 0])
    assert second["probs"] == [0, 0]


def test_of_labels_that_exclude_each_other_the_scores_are_a_softmax_of_the_cosines() -> None:
    prompt = zero_shot(input="a", labels=["x", "y"])
    [entry] = body_of(prompt, vectors([1, 0], [1, 0], [0.6, 0.8]))["data"]
    powers = np.exp(SCALE * np.array([1, 0.6]))
    assert entry["probs"] == pytest.approx((powers / powers.sum()).tolist())
    assert entry["score"] == entry["probs"][0]
    assert "scores" not in entry
    assert "logits" not in entry


def test_a_line_pays_for_its_texts_and_once_for_its_labels() -> None:
    prompt = zero_shot(input=["aa", "b"], labels=["x"], templates=["{}"])
    answer = answer_of(prompt, vectors([1, 0], [1, 0], [1, 0]))
    assert answer.input_tokens == (2 + 2) + (1 + 2) + (1 + 2)


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/classify"])
def test_a_prompt_stands_before_each_text(endpoint: str) -> None:
    labels = {"labels": ["x"], "templates": ["{}"]} if endpoint == "/v1/classify" else {}
    tokenizer = StubTokenizer(PROMPTS)
    given_too = {"tokenizer": tokenizer, "input": ["a", "b"], **labels}
    prompt = prompt_of(endpoint, ModelKind.EMBED, prompt_name="query", **given_too)
    assert texts_of(prompt) == ["Q: a", "Q: b", *(["Q: x"] if labels else [])]
    with pytest.raises(InvalidBody) as caught:
        prompt_of(endpoint, ModelKind.EMBED, prompt_name="other", **given_too)
    assert caught.value.fault.param == "prompt_name"
    assert "passage, query" in caught.value.fault.message


def test_what_is_too_long_is_cut_where_that_is_asked_for_and_told() -> None:
    long = "x" * 50  # and a token at each end, where 32 are room
    inputs: list[Any] = [["ab", long], [[1, 2], [3] * 40]]
    for given_in, cut in zip(inputs, (20, 8), strict=True):
        prompt = prompt_of("/v1/embeddings", ModelKind.EMBED, input=given_in, truncate=True)
        usage = body_of(prompt, vectors([1], [1]))["usage"]
        taken = len(given_in[0]) + (2 if cut == 20 else 0) + 32
        assert usage == {"prompt_tokens": taken, "total_tokens": taken, "truncated_tokens": cut}
    whole = prompt_of("/v1/embeddings", ModelKind.EMBED, input=["ab", long])
    assert [len(text) for text in texts_of(whole)] == [2, 50]
    assert "truncated_tokens" not in body_of(whole, vectors([1], [1]))["usage"]


def test_a_pair_that_is_too_long_is_cut_too() -> None:
    prompt = prompt_of(
        "/v1/score", ModelKind.SCORE, text_1="abc", text_2=["x" * 50, "y"], truncate=True
    )
    first, second = prompts.requests(prompt, key="k")
    assert isinstance(first, EncodeRequest)
    assert isinstance(second, EncodeRequest)
    assert (len(first.tokens), first.first, second.first) == (32, 5, 5)
    usage = body_of(prompt, scored([1], [1]))["usage"]
    assert usage["truncated_tokens"] == 3 + 50 + 4 - 32
    assert usage["total_tokens"] == 32 + len(second.tokens)


def test_scores_are_vllms_object_in_the_order_of_the_pairs() -> None:
    prompt = prompt_of("/v1/score", ModelKind.SCORE, text_1="q", text_2=["a", "b"])
    assert texts_of(prompt) == ["qa", "qb"]
    body = body_of(prompt, scored([0.25], [0.75]))
    assert body.pop("id").startswith("score-")
    assert body == {
        "object": "list",
        "created": 7,
        "model": "m",
        "data": [
            {"index": 0, "object": "score", "score": 0.25},
            {"index": 1, "object": "score", "score": 0.75},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }


def test_an_embedding_model_scores_by_the_cosine_and_reads_one_text_for_all_once() -> None:
    one = prompt_of("/v1/score", ModelKind.EMBED, queries="q", documents=["a", "b"])
    assert texts_of(one) == ["query: q", "a", "b"]
    data = body_of(one, vectors([2, 0], [3, 4], [-1, 0]))["data"]
    assert [entry["score"] for entry in data] == pytest.approx([0.6, -1])
    each = prompt_of("/v1/score", ModelKind.EMBED, text_1=["p", "q"], text_2=["a", "b"])
    data = body_of(each, vectors([1, 0], [0, 1], [1, 0], [1, 0]))["data"]
    assert [entry["score"] for entry in data] == [1, 0]
    # A text that embeds to nothing is like no other.
    data = body_of(each, vectors([0, 0], [0, 1], [1, 0], [0, 1]))["data"]
    assert [entry["score"] for entry in data] == [0, 1]


def test_queries_and_documents_have_the_models_own_prompts() -> None:
    prompt = prompt_of(
        "/v1/rerank",
        ModelKind.EMBED,
        tokenizer=StubTokenizer(PROMPTS),
        query="q",
        documents=["a", {"text": "b"}],
    )
    assert texts_of(prompt) == ["Q: q", "P: a", "P: b"]


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8),
    top_n=st.none() | st.integers(min_value=1, max_value=10),
)
def test_documents_are_ranked_by_score_and_equal_ones_by_index(
    scores: list[float], top_n: int | None
) -> None:
    documents = [f"d{n}" for n in range(len(scores))]
    prompt = prompt_of(
        "/v1/rerank",
        ModelKind.SCORE,
        query="q",
        documents=documents,
        top_n=top_n,
        return_documents=True,
    )
    body = body_of(prompt, scored(*([score] for score in scores)))
    assert body["id"].startswith("rerank-")
    assert set(body) == {"id", "model", "results", "usage"}
    wanted = sorted((-score, n) for n, score in enumerate(scores))[:top_n]
    assert body["results"] == [
        {"index": n, "relevance_score": -score, "document": {"text": documents[n]}}
        for score, n in wanted
    ]
    assert body["usage"]["total_tokens"] == sum(len(text) + 4 for text in texts_of(prompt))


def test_documents_come_back_on_request_only() -> None:
    prompt = prompt_of("/v1/rerank", ModelKind.SCORE, query="q", documents=["a"])
    assert body_of(prompt, scored([1.0]))["results"] == [{"index": 0, "relevance_score": 1}]


def moderate(**body: Any) -> Prompt:
    return prompt_of("/v1/moderations", ModelKind.CLASSIFY, moderation=MAPPING, **body)


def test_a_moderation_is_the_references_object() -> None:
    prompt = moderate(input=["a", "b", "c"])
    body = body_of(prompt, scored([0.6, 0.3, 0.1], [0, 0.25, 0.5], [1, 0, 0]))
    typed = exactly(ModerationCreateResponse, body)
    assert typed.id.startswith("modr-")
    assert [each.flagged for each in typed.results] == [False, True, False]
    # The highest of a category's labels, from the threshold on.
    scores = [each.category_scores.harassment for each in typed.results]
    assert scores == pytest.approx([0.3, 0.5, 0])
    assert typed.results[1].categories.harassment is True
    for each in body["results"]:
        for keys in ("categories", "category_scores", "category_applied_input_types"):
            assert set(each[keys]) == {category.value for category in Category}
        # No label is mapped on it: never flagged, whatever its threshold.
        assert each["categories"]["hate"] is False
        assert each["category_applied_input_types"]["hate"] == []
        assert each["category_applied_input_types"]["harassment"] == ["text"]
    assert answer_of(prompt, scored([1, 0, 0]) * 3, LABELS).input_tokens == 9


def test_what_was_cut_of_a_moderated_text_is_told() -> None:
    prompt = moderate(input="x" * 40, truncate=True)
    body = body_of(prompt, scored([1, 0, 0]))
    assert body["usage"] == {"prompt_tokens": 32, "total_tokens": 32, "truncated_tokens": 10}


def test_a_model_that_lost_its_mapping_fails_the_line() -> None:
    with pytest.raises(InvalidBody) as caught:
        prompt_of("/v1/moderations", ModelKind.CLASSIFY, input="a")
    assert (caught.value.fault.param, caught.value.fault.code) == ("model", "model_not_found")


def test_results_of_another_kind_are_no_answer() -> None:
    prompt = prompt_of("/v1/score", ModelKind.SCORE, text_1="q", text_2="a")
    with pytest.raises(TypeError, match="no Classification"):
        answer_of(prompt, vectors([1]))
    with pytest.raises(TypeError, match="no Embedding"):
        answer_of(zero_shot(input="a", labels=["x"]), scored([1], [1]))


@pytest.mark.parametrize(
    ("prompt", "position", "param"),
    [
        (zero_shot(input=["a", "b"], labels=["x"]), 1, "input"),
        (zero_shot(input=["a", "b"], labels=["x"]), 2, "labels"),
        (prompt_of("/v1/score", ModelKind.EMBED, queries="q", text_2="a"), 0, "queries"),
        (prompt_of("/v1/score", ModelKind.EMBED, queries="q", text_2="a"), 1, "text_2"),
        (prompt_of("/v1/score", ModelKind.SCORE, text_1="q", documents="a"), 0, "documents"),
        (prompt_of("/v1/rerank", ModelKind.EMBED, query="q", documents=["a"]), 0, "query"),
        (moderate(input="a"), 0, "input"),
    ],
)
def test_what_the_engine_refuses_has_the_clients_name(
    prompt: Prompt, position: int, param: str
) -> None:
    for named in (None, "input"):
        assert prompts.param_of(prompt, named, position=position) == param
    assert prompts.param_of(prompt, "dimensions", position=position) == "dimensions"
