"""Do heads give, on hidden states, what the whole model gives on ids?"""

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.model.heads import Head, read_head
from engine.model.scores import Activation, cut, scores
from engine.request import EncodeRequest
from engine.tokenizer import Tokenizer
from tests.unit.engine.conftest import PAD, VOCAB_SIZE, write_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is not ours to mend
    from sentence_transformers import CrossEncoder, SentenceTransformer

CPU = torch.device("cpu")
SMALL = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "num_labels": 3}
BERT_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA_LIKE = {**BERT_LIKE, "num_key_value_heads": 2, "head_dim": 8}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "albert": lambda: transformers.AlbertConfig(**BERT_LIKE, embedding_size=16),
    "bert": lambda: transformers.BertConfig(**BERT_LIKE),
    "deberta": lambda: transformers.DebertaV2Config(
        **BERT_LIKE, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        **SMALL, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=128
    ),
    "electra": lambda: transformers.ElectraConfig(**BERT_LIKE, embedding_size=16),
    "gemma": lambda: transformers.Gemma3TextConfig(**LLAMA_LIKE, sliding_window=8),
    "modernbert-cls": lambda: transformers.ModernBertConfig(**BERT_LIKE, classifier_pooling="cls"),
    "modernbert-mean": lambda: transformers.ModernBertConfig(
        **BERT_LIKE, classifier_pooling="mean"
    ),
    "mpnet": lambda: transformers.MPNetConfig(**BERT_LIKE),
    "nomic-bert": lambda: transformers.NomicBertConfig(**BERT_LIKE),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_LIKE),
    "roberta": lambda: transformers.RobertaConfig(**BERT_LIKE),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**BERT_LIKE),
}
# transformers has no Gemma that classifies tokens.
OF_TOKENS = sorted(set(ARCHITECTURES) - {"gemma", "modernbert-mean"})
TEXTS = ["Paris", "a longer text, of some words", "x", "Zürich 🙂 and more", "", "so so", "good!"]


def build(auto: Any, name: str, **changes: Any) -> Any:
    torch.manual_seed(7)
    config = ARCHITECTURES[name]()
    config.update(changes)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that labels differ by more than rounding
    return model


def config_of(kind: Kind, model: Path = Path("none"), **changes: Any) -> EngineConfig:
    return EngineConfig(model=model, kind=kind, **changes)


def ragged(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and mask of random texts, padded on the right."""
    torch.manual_seed(3)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(3, VOCAB_SIZE, mask.shape) * mask + PAD * (1 - mask), mask


def hidden_of(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_logits_of_texts_equal_those_of_the_whole_model(name: str) -> None:
    model = build(AutoModelForSequenceClassification, name)
    ids, mask = ragged([9, 3, 1, 7, 7, 2, 9])
    expected = model(input_ids=ids, attention_mask=mask).logits
    head = read_head(config_of(Kind.CLASSIFY), model, CPU)

    found = head(hidden_of(model, ids, mask), ids, mask)

    assert found.shape == (7, 3)
    assert found.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # The model itself is as it was.
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("name", OF_TOKENS)
@torch.inference_mode()
def test_logits_of_tokens_equal_those_of_the_whole_model(name: str) -> None:
    model = build(AutoModelForTokenClassification, name)
    ids, mask = ragged([9, 3, 1, 7, 7])
    expected = model(input_ids=ids, attention_mask=mask).logits
    head = read_head(config_of(Kind.TOKEN_CLASSIFY), model, CPU)

    found = head(hidden_of(model, ids, mask), ids, mask)

    assert found.shape == (5, 9, 3)
    assert head.activation is Activation.SOFTMAX
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
@pytest.mark.parametrize("labels", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["bert", "deberta", "modernbert-mean", "roberta", "qwen3"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(name: str, labels: int, auto: Any) -> None:
    model = build(auto, name, num_labels=labels)
    kind = Kind.CLASSIFY if auto is AutoModelForSequenceClassification else Kind.TOKEN_CLASSIFY
    head = read_head(config_of(kind), model, CPU)
    ids, mask = ragged([5] * 23)
    hidden = hidden_of(model, ids, mask)
    alone = torch.cat([head(hidden[n : n + 1], ids[n : n + 1], mask[n : n + 1]) for n in range(23)])
    for count in (*range(2, 14), 23):
        assert torch.equal(head(hidden[:count], ids[:count], mask[:count]), alone[:count])


@torch.inference_mode()
def test_a_model_without_a_padding_id_reads_the_last_token_of_each_row() -> None:
    model = build(AutoModelForSequenceClassification, "qwen3", pad_token_id=None)
    head = read_head(config_of(Kind.CLASSIFY), model, CPU)
    lengths = [9, 3, 1, 7]
    ids, mask = ragged(lengths)
    expected = torch.cat(
        [model(ids[n : n + 1, :length]).logits for n, length in enumerate(lengths)]
    )
    torch.testing.assert_close(
        head(hidden_of(model, ids, mask), ids, mask), expected, rtol=1e-5, atol=1e-5
    )


class Peeking(transformers.BertForSequenceClassification):
    """Classifies by what the head never sees: the ids."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if kwargs.get("inputs_embeds") is None:
            output.logits = output.logits + 1
        return output


class Different(transformers.BertForSequenceClassification):
    """Wants what no other model wants."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize(
    ("kind", "said"), [(Peeking, "differs from the whole model's"), (Different, "by itself")]
)
def test_a_head_that_cannot_be_run_by_itself_is_refused(kind: Any, said: str) -> None:
    model = kind(ARCHITECTURES["bert"]()).eval()
    with pytest.raises(ModelLoadError, match=said):
        read_head(config_of(Kind.CLASSIFY), model, CPU)


def test_labels_are_named_in_the_order_of_the_logits() -> None:
    names = {2: "good", 0: "bad", 1: "so-so"}
    model = build(AutoModelForSequenceClassification, "bert", id2label=names)
    head = read_head(config_of(Kind.CLASSIFY), model, CPU)
    assert head.labels == ("bad", "so-so", "good")
    assert (head.dimensions, head.smaller_dimensions, head.normalizes) == (None, (), False)
    with pytest.raises(ModelLoadError, match="no vectors"):
        read_head(config_of(Kind.CLASSIFY, dimensions=(8,)), model, CPU)


def saved(folder: Path, **changes: Any) -> Any:
    model = build(AutoModelForSequenceClassification, "bert", **changes)
    model.save_pretrained(folder)
    write_tokenizer(
        folder,
        ends=True,
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    return model


@torch.inference_mode()
def logits_of(head: Head, model: Any, texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    rows = []
    for tokens in tokenizer.encode(texts):
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        rows.append(head(hidden_of(model, ids, mask), ids, mask)[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 3}, Activation.SOFTMAX),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, Activation.SOFTMAX),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, Activation.SIGMOID),
        ({"num_labels": 3, "problem_type": "regression"}, Activation.IDENTITY),
        ({"num_labels": 1}, Activation.SIGMOID),
    ],
)
def test_scores_equal_those_of_the_pipeline(
    tmp_path: Path, changes: dict[str, Any], activation: Activation
) -> None:
    model = saved(tmp_path, **changes)
    classify = pipeline(
        "text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)
    )
    expected = [{r["label"]: r["score"] for r in row} for row in classify(TEXTS, top_k=None)]
    head = read_head(config_of(Kind.CLASSIFY, tmp_path), model, CPU)
    assert head.activation is activation

    found = scores(logits_of(head, model, TEXTS, Tokenizer.from_dir(tmp_path)), head.activation)

    for row, wanted in zip(found, expected, strict=True):
        assert dict(zip(head.labels, row.tolist(), strict=True)) == pytest.approx(wanted, abs=1e-6)


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 1}, Activation.SIGMOID),
        ({"num_labels": 3}, Activation.IDENTITY),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}},
            Activation.IDENTITY,
        ),
        ({"num_labels": 3, "sbert_ce_default_activation_function": SIGMOID}, Activation.SIGMOID),
    ],
)
def test_scores_of_pairs_equal_those_of_a_cross_encoder(
    tmp_path: Path, changes: dict[str, Any], activation: Activation
) -> None:
    model = saved(tmp_path, **changes)
    pairs = [(text, other) for text in TEXTS[:4] for other in TEXTS]
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    expected = theirs.predict(pairs).reshape(len(pairs), -1)
    theirs.save_pretrained(str(tmp_path / "saved"))  # its own newer layout says the same

    for folder in (tmp_path, tmp_path / "saved"):
        head = read_head(config_of(Kind.SCORE, folder), model, CPU)
        assert head.activation is activation
        read = Tokenizer.from_dir(folder).encode_pairs(pairs)
        requests = [EncodeRequest(n, tuple(p.tokens), p.first) for n, p in enumerate(read)]
        results = dict(Engine(config_of(Kind.SCORE, folder)).run(requests))
        found = [results[n].scores for n in range(len(pairs))]  # type: ignore[union-attr]  # no failure
        np.testing.assert_allclose(np.stack(found), expected, rtol=0, atol=1e-5)


def test_what_a_cross_encoder_asks_for_and_is_not_known_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, num_labels=1)
    path = tmp_path / "config_sentence_transformers.json"
    for stated, said in [
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ({"activation_fn": "mine.Activation"}, "mine"),
        ({"prompts": {"query": "find: "}}, "prompts"),
    ]:
        path.write_text(json.dumps(stated))
        with pytest.raises(ModelLoadError, match=said):
            read_head(config_of(Kind.SCORE, tmp_path), model, CPU)
    path.unlink()
    parts = [
        {"idx": n, "name": str(n), "path": "", "type": f"sentence_transformers.x.{name}"}
        for n, name in enumerate(["Transformer", "LogitScore"])
    ]
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    with pytest.raises(ModelLoadError, match="LogitScore"):
        read_head(config_of(Kind.SCORE, tmp_path), model, CPU)


def test_extreme_logits_make_scores_without_a_warning() -> None:
    logits = np.array([[-1e4, 0.0, 1e4], [3e38, -3e38, 3e38]], dtype=np.float32)
    assert scores(logits, Activation.SIGMOID).tolist() == [[0, 0.5, 1], [1, 0, 1]]
    assert scores(logits, Activation.SOFTMAX).tolist() == [[0, 0, 1], [0.5, 0, 0.5]]
    assert np.array_equal(scores(logits, Activation.IDENTITY), logits)


@torch.inference_mode()
def embedding_head(folder: Path, **changes: Any) -> tuple[Head, Any]:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return read_head(config_of(Kind.EMBED, folder, **changes), model, CPU), model


def write_json(path: Path, **changes: Any) -> None:
    stated = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**stated, **changes}))


def test_smaller_dimensions_come_from_the_model_and_the_catalog(encoder: Path) -> None:
    assert embedding_head(encoder)[0].smaller_dimensions == ()
    write_json(encoder / "config.json", matryoshka_dimensions=[32, 8, 16])
    head, _ = embedding_head(encoder, dimensions=(24, 8))
    assert head.dimensions == 32
    assert head.smaller_dimensions == (8, 16, 24)
    assert head.normalizes
    for impossible in (33, 0):
        with pytest.raises(ModelLoadError, match=f"lists {impossible} dimensions"):
            embedding_head(encoder, dimensions=(impossible,))


@pytest.fixture
def encoder(tiny_encoder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny encoder, to be changed."""
    return Path(shutil.copytree(tiny_encoder, tmp_path / "model"))


@torch.inference_mode()
def test_a_cut_vector_equals_that_of_sentence_transformers(encoder: Path) -> None:
    head, model = embedding_head(encoder, dimensions=(8,))
    found = logits_of(head, model, TEXTS, Tokenizer.from_dir(encoder))
    theirs = SentenceTransformer(str(encoder), device="cpu", truncate_dim=8)
    expected = theirs.encode(TEXTS, normalize_embeddings=True)
    short = np.stack([cut(row, 8, normalizes=head.normalizes) for row in found])
    np.testing.assert_allclose(short, expected, rtol=0, atol=1e-6)

    write_json(encoder / "config_sentence_transformers.json", truncate_dim=8)
    head, _ = embedding_head(encoder)
    assert (head.dimensions, head.smaller_dimensions) == (8, ())
    own = logits_of(head, model, TEXTS, Tokenizer.from_dir(encoder))
    np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6)


def test_a_vector_is_cut_in_float32_and_normalised_where_the_model_normalises() -> None:
    vector = np.array([3.0, 4.0, 12.0], dtype=np.float16)
    assert cut(vector, 2, normalizes=True).tolist() == pytest.approx([0.6, 0.8])
    assert cut(vector, 2, normalizes=False).tolist() == [3, 4]
    assert cut(vector, None, normalizes=True).tolist() == [3, 4, 12]
    assert cut(np.zeros(3, dtype=np.float32), 2, normalizes=True).tolist() == [0, 0]
    whole = cut(vector.astype(np.float32), None, normalizes=True)
    assert whole.dtype == np.float32
    assert whole.base is None  # keeps nothing else alive


def test_a_generating_model_has_no_head() -> None:
    config = dataclasses.replace(config_of(Kind.EMBED), kind=Kind.GENERATE)
    with pytest.raises(ModelLoadError, match="no such head"):
        read_head(config, None, CPU)
