"""Are vectors those of sentence-transformers, and does the loop survive shortages and NaN?"""

import dataclasses
import inspect
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig, Kind
from engine.encode.padded import EncodeLoop
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.model.load import Encoder, load_encoder
from engine.model.pooling import pool
from engine.request import Embedding, EncodeRequest, Failure, FailureReason, Result
from engine.tokenizer import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports is not ours to mend
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling

MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
WIDTH = 32


def vectors_of(results: dict[int, Result]) -> np.ndarray:
    rows = []
    for _, result in sorted(results.items()):
        assert isinstance(result, Embedding)
        rows.append(result.vector)
    return np.stack(rows)


def docstrings(count: int) -> list[str]:
    """Real, ragged texts: from a word to a page."""
    modules = (random, inspect, json, shutil, np, torch)
    found = []
    for module in modules:
        for name in sorted(dir(module)):
            text = inspect.getdoc(getattr(module, name, None))
            if text:
                found.append(text[: 40 + 97 * len(found) % 700])
                found.append(name)
    return found[:count]


def test_vectors_equal_those_of_sentence_transformers(minilm: Path) -> None:
    tokenizer = Tokenizer.from_dir(minilm)
    texts = [t for t in docstrings(400) if len(tokenizer.encode([t])[0]) <= 256]
    assert len(texts) >= 300
    tokens = tokenizer.encode(texts)
    assert max(map(len, tokens)) > 150
    assert min(map(len, tokens)) < 6
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokens)]
    engine = Engine(EngineConfig(model=minilm, kind=Kind.EMBED))
    found = vectors_of(dict(engine.run(requests)))

    expected = SentenceTransformer(str(minilm), device="cpu").encode(texts)

    assert engine.dimensions == expected.shape[1] == 384
    assert np.abs(found - expected).max() <= 1e-5
    waste = 1 - engine.counters.input_tokens / engine.counters.padded_tokens
    assert waste < 0.2


@pytest.mark.parametrize("mode", MODES)
def test_pooling_equals_that_of_sentence_transformers(mode: str) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(6, 9, WIDTH)
    lengths = torch.tensor([1, 2, 9, 5, 8, 3])
    mask = (torch.arange(9) < lengths[:, None]).long()
    features = {"token_embeddings": hidden, "attention_mask": mask}
    expected = Pooling(WIDTH, pooling_mode=mode)(features)["sentence_embedding"]  # type: ignore[arg-type]  # a word of its Literal
    torch.testing.assert_close(pool(mode, hidden, mask), expected, rtol=0, atol=1e-6)


def rewrite(folder: Path, target: Path, parts: dict[str, dict[str, Any]]) -> Path:
    """A copy of the tiny encoder with other parts after the transformer, weights included."""
    shutil.copytree(folder, target)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, (name, config) in enumerate(parts.items(), start=1):
        part = target / f"{index}_{name}"
        part.mkdir(exist_ok=True)
        (part / "config.json").write_text(json.dumps(config))
        kind = name.rstrip("0123456789")
        modules.append(
            {
                "idx": index,
                "name": str(index),
                "path": part.name,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        generator = torch.Generator().manual_seed(index)
        if kind == "Dense":
            out, into = config["out_features"], config["in_features"]
            weights = {"linear.weight": torch.randn(out, into, generator=generator)}
            if config["bias"]:
                weights["linear.bias"] = torch.randn(out, generator=generator)
            save_file(weights, part / "model.safetensors")
        if kind == "LayerNorm":
            weights = {
                "norm.weight": torch.randn(config["dimension"], generator=generator),
                "norm.bias": torch.randn(config["dimension"], generator=generator),
            }
            save_file(weights, part / "model.safetensors")
    (target / "modules.json").write_text(json.dumps(modules))
    return target


def dense(into: int, out: int, activation: str, *, bias: bool = True) -> dict[str, Any]:
    return {
        "in_features": into,
        "out_features": out,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }


HEADS: dict[str, dict[str, dict[str, Any]]] = {
    "two-modes-at-once": {
        "Pooling": {
            "word_embedding_dimension": WIDTH,
            "pooling_mode_cls_token": True,
            "pooling_mode_max_tokens": True,
            "pooling_mode_mean_tokens": False,
        }
    },
    "newer-names": {
        "Pooling": {
            "embedding_dimension": WIDTH,
            "pooling_mode": ["lasttoken", "mean"],
            "include_prompt": True,
        },
        "Normalize": {"module_input_name": "sentence_embedding"},
    },
    "dense-and-norms": {
        "Pooling": {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
        "Dense": dense(WIDTH, 48, "activation.Tanh"),
        "LayerNorm": {"dimension": 48},
        "Dense2": dense(48, 16, "linear.Identity", bias=False),
        "Normalize": {},
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_parts_after_the_transformer_equal_those_of_sentence_transformers(
    tiny_encoder: Path, tmp_path: Path, name: str
) -> None:
    folder = rewrite(tiny_encoder, tmp_path / name, HEADS[name])
    texts = ["a", "some words", "a much longer text of many bytes, 50 or so in all"]
    tokens = Tokenizer.from_dir(folder).encode(texts)
    engine = Engine(EngineConfig(model=folder, kind=Kind.EMBED))
    requests = [EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokens)]
    found = vectors_of(dict(engine.run(requests)))
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert engine.dimensions == expected.shape[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


MEAN = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "no pooling mode": {"Pooling": {"word_embedding_dimension": WIDTH}},
    "'attention'": {"Pooling": {"pooling_mode": "attention"}},
    "'pooling_mode_new'": {"Pooling": {**MEAN, "pooling_mode_new": True}},
    "WeightedLayerPooling": {"Pooling": MEAN, "WeightedLayerPooling": {}},
    "Transformer and Pooling first": {"Normalize": {}},
    "use_residual": {
        "Pooling": MEAN,
        "Dense": {**dense(WIDTH, WIDTH, "linear.Identity"), "use_residual": True},
    },
    "module_input_name": {"Pooling": MEAN, "Normalize": {"module_input_name": "token_embeddings"}},
    "activation": {"Pooling": MEAN, "Dense": dense(WIDTH, 8, "activation.Hardshrink")},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_unknown_part_or_option_is_refused_at_load(
    tiny_encoder: Path, tmp_path: Path, reason: str
) -> None:
    folder = rewrite(tiny_encoder, tmp_path / "refused", REFUSED[reason])
    with pytest.raises(ModelLoadError, match=reason):
        Engine(EngineConfig(model=folder, kind=Kind.EMBED))


def test_an_unknown_option_of_the_transformer_is_refused_at_load(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "model")
    config = {"max_seq_length": 64, "query_expansion": {"token": "[MASK]"}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="query_expansion"):
        Engine(EngineConfig(model=folder, kind=Kind.EMBED))


def test_pickled_weights_are_never_read(tiny_encoder: Path, tmp_path: Path) -> None:
    parts = {"Pooling": MEAN, "Dense": dense(WIDTH, 8, "activation.Tanh")}
    folder = rewrite(tiny_encoder, tmp_path / "dense", parts)
    weights = folder / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        Engine(EngineConfig(model=folder, kind=Kind.EMBED))
    whole = shutil.copytree(tiny_encoder, tmp_path / "whole")
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Engine(EngineConfig(model=whole, kind=Kind.EMBED))


def test_weights_that_are_missing_are_not_made_up(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"lack encoder\.layer\.2"):
        Engine(EngineConfig(model=folder, kind=Kind.EMBED))


def test_a_folder_that_says_no_pooling_needs_one_from_the_catalog(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "plain")
    (folder / "modules.json").unlink()
    config = EngineConfig(model=folder, kind=Kind.EMBED)
    with pytest.raises(ModelLoadError, match="pooling"):
        Engine(config)
    request = EncodeRequest(0, (1, 50, 60, 2))
    [(_, plain)] = Engine(dataclasses.replace(config, pooling="mean")).run([request])
    [(_, stated)] = Engine(dataclasses.replace(config, model=tiny_encoder)).run([request])
    assert isinstance(plain, Embedding)
    assert isinstance(stated, Embedding)
    np.testing.assert_array_equal(plain.vector, stated.vector)
    with pytest.raises(ModelLoadError, match="catalog says pooling 'cls'"):
        Engine(dataclasses.replace(config, model=tiny_encoder, pooling="cls"))


def test_a_context_beyond_the_models_positions_is_refused(tiny_encoder: Path) -> None:
    config = EngineConfig(model=tiny_encoder, kind=Kind.EMBED)
    assert Engine(config).context_length == 64
    assert Engine(dataclasses.replace(config, context_length=128)).context_length == 128
    with pytest.raises(ModelLoadError, match="129"):
        Engine(dataclasses.replace(config, context_length=129))


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=folder, kind=Kind.EMBED, **changes)


class Moody:
    """A model whose output, or shortage of memory, `answer` decides."""

    def __init__(self, model: Any, answer: Callable[[Any, Any], Any]) -> None:
        self._model = model
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._answer(self._model, inputs)


def texts(lengths: list[int]) -> list[EncodeRequest]:
    return [
        EncodeRequest(n, tuple(40 + (n + i) % 90 for i in range(k))) for n, k in enumerate(lengths)
    ]


def drain(encoder: Encoder, requests: list[EncodeRequest], **changes: Any) -> dict[int, Result]:
    loop = EncodeLoop(encoder, config_of(Path("unused"), **changes))
    loop.add(requests)
    results: dict[int, Result] = {}
    with torch.inference_mode():
        for _ in range(500):
            for result in loop.step().results:
                assert result.id not in results
                results[result.id] = result  # type: ignore[index]  # ids are integers here
            if len(results) == len(requests):
                return results
    pytest.fail("the loop did not finish")


def short_of_memory(fails: Callable[[torch.Size], bool]) -> Callable[[Any, Any], Any]:
    def answer(model: Any, inputs: Any) -> Any:
        if fails(inputs["input_ids"].shape):
            msg = "injected"
            raise torch.OutOfMemoryError(msg)
        return model(**inputs)

    return answer


def test_a_batch_that_is_too_large_for_memory_is_cut(tiny_encoder: Path) -> None:
    encoder = load_encoder(config_of(tiny_encoder))
    requests = texts([5 + n % 50 for n in range(60)])
    expected = vectors_of(drain(encoder, requests))
    sizes: list[int] = []

    def fails(shape: torch.Size) -> bool:
        sizes.append(shape.numel())
        return shape.numel() > 150

    moody = dataclasses.replace(encoder, model=Moody(encoder.model, short_of_memory(fails)))
    np.testing.assert_allclose(vectors_of(drain(moody, requests)), expected, atol=1e-6)
    assert max(sizes) > 150
    assert len([size for size in sizes if size > 150]) < 25


def test_a_text_too_large_for_memory_even_alone_fails_alone(tiny_encoder: Path) -> None:
    encoder = load_encoder(config_of(tiny_encoder))
    moody = Moody(encoder.model, short_of_memory(lambda shape: shape[1] > 40))
    requests = texts([60, 5, 41, 40, 12])
    results = drain(dataclasses.replace(encoder, model=moody), requests)
    failed = {n for n, result in results.items() if isinstance(result, Failure)}
    assert failed == {0, 2}
    for n in failed:
        result = results[n]
        assert isinstance(result, Failure)
        assert result.reason is FailureReason.OUT_OF_MEMORY


def poisoned(dtypes: set[torch.dtype]) -> Callable[[Any, Any], Any]:
    """Rows that begin with token 41 come out NaN while the model is in one of these dtypes."""

    def answer(model: Any, inputs: Any) -> Any:
        output = model(**inputs)
        if model.dtype in dtypes:
            output.last_hidden_state[inputs["input_ids"][:, 0] == 41] = float("nan")
        return output

    return answer


def test_a_row_that_overflows_is_run_again_in_float32_and_the_model_is_left_as_it_was(
    tiny_encoder: Path,
) -> None:
    encoder = load_encoder(config_of(tiny_encoder, dtype="bfloat16"))
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    expected = vectors_of(drain(encoder, texts([9] * 4)))
    moody = Moody(encoder.model, poisoned({torch.bfloat16}))
    found = vectors_of(drain(dataclasses.replace(encoder, model=moody), texts([9] * 4)))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    np.testing.assert_allclose(found[1], expected[1], atol=0.05)
    after = encoder.model.state_dict()
    assert all(
        torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before
    )


def test_a_row_that_is_not_finite_in_float32_either_fails_alone(tiny_encoder: Path) -> None:
    encoder = load_encoder(config_of(tiny_encoder))
    moody = Moody(encoder.model, poisoned({torch.float32}))
    results = drain(dataclasses.replace(encoder, model=moody), texts([9] * 4))
    failure = results[1]
    assert isinstance(failure, Failure)
    assert failure.reason is FailureReason.NON_FINITE
    assert all(isinstance(results[n], Embedding) for n in (0, 2, 3))
