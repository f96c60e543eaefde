"""Are texts that run end to end, without padding, computed as each of them alone?"""

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.config import EngineConfig, Kind, Quantize
from engine.encode.packed import Packed
from engine.encode.probe import probe
from engine.encode.texts import Text
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.model.load import Encoder, load_encoder
from engine.request import (
    Classification,
    Embedding,
    EncodeRequest,
    Result,
    TokenClassification,
)
from engine.tokenizer import Tokenizer
from tests.unit.engine.conftest import (
    VOCAB_SIZE,
    write_modules,
    write_tokenizer,
)
from tests.unit.engine.encoders import ARCHITECTURES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is not ours to mend
    from sentence_transformers import SentenceTransformer

PACKED = sorted(name for name, (_, _, path) in ARCHITECTURES.items() if path == "packed")

MakeEncoder = Callable[[str], Path]


@pytest.fixture(scope="session")
def make_encoder(tmp_path_factory: pytest.TempPathFactory) -> MakeEncoder:
    """The folder, in sentence-transformers' layout, of a tiny random encoder."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            config, pooling, _ = ARCHITECTURES[name]
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(7)
            model = transformers.AutoModel.from_config(config())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(5)  # so that attention decides much
            model.save_pretrained(folder)
            write_tokenizer(folder, ends=True)
            write_modules(folder, ["Transformer", "Pooling", "Normalize"])
            (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 120}')
            (folder / "1_Pooling").mkdir()
            stated = {"embedding_dimension": 32, "pooling_mode": pooling}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
            made[name] = folder
        return made[name]

    return make


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=folder, kind=Kind.EMBED, **changes)


def requests_of(lengths: list[int]) -> list[EncodeRequest]:
    generator = np.random.default_rng(len(lengths))
    return [
        EncodeRequest(n, (1, *map(int, generator.integers(3, VOCAB_SIZE, length - 2)), 2))
        for n, length in enumerate(lengths)
    ]


def vectors_of(results: dict[Any, Result]) -> np.ndarray:
    rows = []
    for _, result in sorted(results.items()):
        assert isinstance(result, Embedding)
        rows.append(result.vector)
    return np.stack(rows)


RAGGED = [40, 40, 40, 3, 17, 9, 9, 100, 64, 65, 66, 2, 33, 33, 8, 7, 12, 5, 5, 5, 5, 90, 41]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states_equal_those_of_each_text_alone_in_the_plain_model(
    make_encoder: MakeEncoder, name: str
) -> None:
    folder = make_encoder(name)
    config = config_of(folder)
    encoder = load_encoder(config)
    found = probe(encoder, config)
    plain = transformers.AutoModel.from_pretrained(folder).eval()
    texts = [Text.of(r) for r in sorted(requests_of(RAGGED), key=lambda r: -len(r.tokens))]
    expected = []
    with torch.inference_mode():
        for text in texts:
            hidden = plain(input_ids=torch.tensor([text.tokens])).last_hidden_state
            expected.append(
                encoder.head(hidden, torch.ones(1), torch.ones(hidden.shape[:2]).long())
            )
        rows = found.forward.rows(texts)

    assert found.forward.path == ARCHITECTURES[name][2]
    wanted = torch.cat(expected).numpy()
    assert np.abs(wanted - wanted[0]).max() > 0.05  # they do differ
    assert np.abs(np.stack(rows) - wanted).max() <= 1e-5
    assert found.same_bytes == (found.forward.path == "packed")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_equal_those_of_sentence_transformers(make_encoder: MakeEncoder, name: str) -> None:
    folder = make_encoder(name)
    texts = [("word " * (n % 9) + f"text {n} " * (n % 7))[:110] for n in range(60)]
    texts = [text for text in texts if text]
    tokens = Tokenizer.from_dir(folder).encode(texts)
    engine = Engine(config_of(folder, token_budget=512))
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokens)]
    found = vectors_of(dict(engine.run(requests)))

    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)

    assert engine.status.path == ARCHITECTURES[name][2]
    assert np.abs(found - expected).max() <= 1e-5
    padding = 1 - sum({ids: len(ids) for ids in map(tuple, tokens)}.values()) / (
        engine.counters.padded_tokens
    )
    assert padding == 0 if engine.status.path == "packed" else padding <= 0.1


@pytest.mark.parametrize("name", PACKED)
def test_a_text_has_the_same_bytes_alone_batched_and_among_other_neighbours(
    make_encoder: MakeEncoder, name: str
) -> None:
    config = config_of(make_encoder(name), token_budget=1024)
    generator = np.random.default_rng(5)
    requests = requests_of([int(n) for n in generator.integers(2, 120, 250)])
    everything = vectors_of(dict(Engine(config).run(requests)))

    half = vectors_of(
        dict(
            Engine(config).run([dataclasses.replace(r, id=n) for n, r in enumerate(requests[1::2])])
        )
    )
    engine = Engine(dataclasses.replace(config, token_budget=1))
    alone = [vectors_of(dict(engine.run([dataclasses.replace(r, id=0)]))) for r in requests[:60]]

    assert everything[1::2].tobytes() == half.tobytes()
    assert everything[:60].tobytes() == np.concatenate(alone).tobytes()


def test_real_vectors_equal_those_of_sentence_transformers_on_two_thousand_ragged_texts(
    minilm: Path, ragged_texts: list[str]
) -> None:
    tokenizer = Tokenizer.from_dir(minilm)
    tokens = tokenizer.encode(ragged_texts, limit=256)
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokens)]
    engine = Engine(config_of(minilm))
    found = vectors_of(dict(engine.run(requests)))

    expected = SentenceTransformer(str(minilm), device="cpu").encode(ragged_texts, batch_size=8)

    assert len(found) >= 2000
    assert engine.status.path == "packed"
    assert engine.status.same_bytes
    assert np.abs(found - expected).max() <= 1e-5
    assert (found * expected).sum(axis=1).min() >= 0.999999
    distinct = {ids: len(ids) for ids in map(tuple, tokens)}
    assert engine.counters.padded_tokens == sum(distinct.values())
    assert engine.counters.twins == len(tokens) - len(distinct)


def test_real_vectors_have_the_same_bytes_whatever_their_neighbours(
    minilm: Path, ragged_texts: list[str]
) -> None:
    tokens = Tokenizer.from_dir(minilm).encode(ragged_texts[::5], limit=256)
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokens)]
    everything = vectors_of(dict(Engine(config_of(minilm)).run(requests)))
    again = {}
    for start in (0, 1):
        engine = Engine(config_of(minilm, token_budget=700 + 900 * start))
        again |= {result.id: result for _, result in engine.run(requests[start::2])}
    assert len(requests) >= 400
    assert everything.tobytes() == vectors_of(again).tobytes()
    engine = Engine(config_of(minilm))
    for request in requests[:40]:
        [(_, result)] = engine.run([request])
        assert isinstance(result, Embedding)
        assert result.vector.tobytes() == everything[request.id].tobytes()


class Deaf:
    """A model whose layers do not all attend by the interface, or not rightly."""

    def __init__(self, model: Any, spoil: Callable[[Any], None]) -> None:
        self._model = model
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        if "pack" in inputs:
            self._spoil(inputs)
        return self._model(**inputs)


def no_positions(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None] % 128


def one_sequence(inputs: dict[str, Any]) -> None:
    pack = inputs["pack"]
    [*_, last] = pack.runs
    whole = dataclasses.replace(pack.runs[0], start=0, count=1, length=last.end)
    object.__setattr__(pack, "runs", (whole,))


@pytest.mark.parametrize("spoil", [no_positions, one_sequence])
def test_a_model_that_goes_wrong_in_a_pack_falls_back_and_says_so(
    make_encoder: MakeEncoder,
    spoil: Callable[[Any], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(make_encoder("bert"))
    encoder = load_encoder(config)
    deaf: Encoder = dataclasses.replace(encoder, model=Deaf(encoder.model, spoil))
    with caplog.at_level(logging.WARNING):
        found = probe(deaf, config)
    assert found.forward.path == "padded"
    assert not found.same_bytes
    assert "padded" in caplog.text


def test_a_pack_marks_the_second_text_of_a_pair(make_encoder: MakeEncoder) -> None:
    config = config_of(make_encoder("bert"))
    encoder = load_encoder(config)
    plain = transformers.AutoModel.from_pretrained(config.model).eval()
    packed = probe(encoder, config).forward
    assert isinstance(packed, Packed)
    pairs = [
        dataclasses.replace(r, first=k)
        for r, k in zip(requests_of([9, 9, 9, 4]), (9, 3, 0, 2), strict=True)
    ]
    with torch.inference_mode():
        found = packed.rows([Text.of(pair) for pair in pairs])
        for row, pair in zip(found, pairs, strict=True):
            types = torch.tensor([[int(n >= (pair.first or 0)) for n in range(len(pair.tokens))]])
            ids = torch.tensor([pair.tokens])
            hidden = plain(input_ids=ids, token_type_ids=types).last_hidden_state
            expected = encoder.head(hidden, ids, torch.ones_like(ids))
            np.testing.assert_allclose(row, expected[0].numpy(), atol=1e-5)


def test_a_last_token_that_does_not_end_a_text_is_refused_at_load(
    make_encoder: MakeEncoder, tmp_path: Path
) -> None:
    folder = tmp_path / "no-end"
    folder.symlink_to(make_encoder("qwen3"))
    own = tmp_path / "own"
    own.mkdir()
    for part in folder.iterdir():
        (own / part.name).symlink_to(part.resolve())
    (own / "tokenizer.json").unlink()
    (own / "tokenizer_config.json").unlink()
    write_tokenizer(own, ends=False)
    with pytest.raises(ModelLoadError, match="last token"):
        Engine(config_of(own))


LABELLED = [
    "bert",
    "deberta",
    "distilbert",
    "modernbert",
    "mpnet",
    "qwen3",
    "roberta",
    "xlm-roberta",
]


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("kind", [Kind.CLASSIFY, Kind.TOKEN_CLASSIFY])
def test_scores_equal_those_of_the_plain_model(name: str, kind: Kind, tmp_path: Path) -> None:
    config, _, path = ARCHITECTURES[name]
    torch.manual_seed(7)
    described = config()
    described.num_labels = 3
    auto = (
        transformers.AutoModelForSequenceClassification
        if kind is Kind.CLASSIFY
        else transformers.AutoModelForTokenClassification
    )
    plain = auto.from_config(described).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    plain.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, ends=True)
    engine = Engine(EngineConfig(model=tmp_path, kind=kind, context_length=120, token_budget=512))
    requests = requests_of(RAGGED)
    results = dict(engine.run(requests))
    assert engine.status.path == path
    with torch.inference_mode():
        for n, request in enumerate(requests):
            logits = plain(input_ids=torch.tensor([request.tokens])).logits[0]
            result = results[n]
            assert isinstance(result, Classification | TokenClassification)
            expected = logits.softmax(dim=-1).numpy()
            np.testing.assert_allclose(result.scores, expected, atol=2e-5)


@pytest.mark.parametrize("name", PACKED)
def test_int8_runs_packed_and_neighbours_change_nothing(
    make_encoder: MakeEncoder, name: str
) -> None:
    config = config_of(make_encoder(name))
    requests = requests_of(RAGGED)
    plain = vectors_of(dict(Engine(config).run(requests)))
    engine = Engine(dataclasses.replace(config, quantize=Quantize.INT8))
    found = vectors_of(dict(engine.run(requests)))
    assert engine.status.path == "packed"
    assert engine.status.same_bytes
    assert ((plain * found).sum(axis=1) > 0.98).all()
