"""Do classify, score and tag lines go the whole way on real engines, loaded as a worker does?"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import transformers

from service.batch import BatchStatus
from service.catalog import Catalog
from tests import invariants
from tests.pipeline import Pipeline
from tests.unit.engine.conftest import SMALL, write_tokenizer
from worker import engine_process

LABELS = {
    "classify": ("bad", "so-so", "good"),
    "score": ("relevant",),
    "token_classify": ("O", "B-NAME", "I-NAME"),
}


def write_model(folder: Path, kind: str) -> Any:
    """A tiny random BERT of that kind, saved; returned as transformers has it."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        **SMALL,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        id2label=dict(enumerate(LABELS[kind])),
    )
    auto = (
        transformers.AutoModelForTokenClassification
        if kind == "token_classify"
        else transformers.AutoModelForSequenceClassification
    )
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that texts differ by more than rounding
    model.save_pretrained(folder)
    write_tokenizer(folder, ends=True)
    return model


@pytest.fixture
def run(pipeline: Pipeline, tmp_path: Path) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """Runs bodies on a tiny model of a kind; gives the model and what the lines were answered."""

    def go(kind: str, endpoint: str, *bodies: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
        model = write_model(tmp_path / kind, kind)
        toml = tmp_path / "models.toml"
        toml.write_text(
            f'[[models]]\nid = "tiny"\nkind = "{kind}"\nsource = "{kind}"\nprice_input = 0.02\n'
        )
        resources = replace(pipeline.resources, catalog=Catalog.load(toml))
        on = replace(pipeline, resources=resources)
        lines = [
            orjson.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": endpoint,
                    "body": {"model": "tiny", **body},
                }
            )
            for number, body in enumerate(bodies)
        ]
        batch_id = on.submit(lines, endpoint=endpoint)
        on.validate()
        on.plan()
        with engine_process.serving(resources) as process:
            process.drain("tiny")
        on.assemble()
        on.clean()
        assert on.batch(batch_id).status is BatchStatus.COMPLETED
        invariants.check(on, batch_id)
        found = on.output(batch_id) + on.errors(batch_id)
        return model, [
            line["response"]["body"]
            for line in sorted(found, key=lambda line: int(line["custom_id"]))
        ]

    return go


@torch.inference_mode()
def logits(model: Any, text: str, second: str | None = None) -> torch.Tensor:
    """What the plain model says of one text or pair. Returns [labels] or [tokens, labels]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
    inputs = tokenizer(text, second, return_tensors="pt")
    return model(input_ids=inputs["input_ids"]).logits[0]


def test_a_real_classifier_answers_as_the_plain_model(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    texts = ["fine", "a longer text", "x", "fine", "again and again"]
    model, bodies = run(
        "classify",
        "/v1/classify",
        *({"input": text, "return_all_scores": True, "logits": True} for text in texts),
        {"input": "y" * 70},
        {"input": "y" * 70, "truncate": True},
    )
    model.name_or_path = str(tmp_path / "classify")
    for text, body in zip(texts, bodies, strict=False):
        expected = logits(model, text)
        [entry] = body["data"]
        assert entry["logits"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert entry["probs"] == pytest.approx(expected.softmax(-1).tolist(), abs=1e-5)
        assert entry["label"] == LABELS["classify"][int(expected.argmax())]
    refused, cut = bodies[len(texts) :]
    assert "64 tokens" in refused["error"]["message"]
    assert "72 tokens" in refused["error"]["message"]
    assert cut["usage"] == {"prompt_tokens": 64, "total_tokens": 64, "truncated_tokens": 8}


def test_a_real_tagger_finds_spans_at_their_characters(run: Callable[..., Any]) -> None:
    text = "ab é 🙂 " * 20  # longer than the model's context, and not of single bytes
    _, (body,) = run("token_classify", "/v1/classify", {"input": text, "aggregation": "simple"})
    spans = body["data"][0]["spans"]
    assert spans
    assert all(text[span["start"] : span["end"]] == span["text"] for span in spans)
    assert spans[-1]["end"] > 64
    assert [span["start"] for span in spans] == sorted(span["start"] for span in spans)


def test_a_real_cross_encoder_ranks_documents(run: Callable[..., Any], tmp_path: Path) -> None:
    documents = ["one", "another", "a third one"]
    model, [scored] = run("score", "/v1/score", {"text_1": "q", "text_2": documents})
    _, [ranked] = run("score", "/v1/rerank", {"query": "q", "documents": documents})
    model.name_or_path = str(tmp_path / "score")
    expected = [float(logits(model, "q", each).sigmoid()) for each in documents]
    scores = [entry["score"] for entry in scored["data"]]
    assert scores == pytest.approx(expected, abs=1e-5)
    order = sorted(range(3), key=lambda n: -expected[n])
    assert [entry["index"] for entry in ranked["results"]] == order
