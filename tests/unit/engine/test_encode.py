"""Are vectors those of sentence-transformers, and is what a folder does not say refused?"""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.model.pooling import pool
from engine.request import Embedding, EncodeRequest, Result
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
