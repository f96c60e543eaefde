"""How does a text's vector come from its tokens' vectors? As the model's own files say.

The parts that sentence-transformers puts after the transformer, read from modules.json and the
config.json of each. A part or option that is not known here is refused at load, never guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.model.files import (
    ModuleEntry,
    modules_of,
    pools_prompts,
    prompts_of,
    read_json,
    transformer_folder,
)
from engine.model.rows import in_groups
from engine.model.scores import Activation

Stage = Callable[[Tensor], Tensor]  # [rows, dims] → [rows, dims']

# Older config.json files have one switch a mode; several at once are concatenated in this order.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_ACTIVATIONS: dict[str, Stage] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """What makes one vector of a text's hidden states; computes in float32."""

    modes: tuple[str, ...]
    stages: tuple[Stage, ...]
    dimensions: int
    smaller_dimensions: tuple[int, ...]
    normalizes: bool
    labels: tuple[str, ...] = ()
    activation: Activation = Activation.IDENTITY

    def __call__(self, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002 Head's form
        """As `heads.Head` says: float32 [n, dimensions]."""
        hidden = hidden.float()
        vectors = torch.cat([pool(mode, hidden, mask) for mode in self.modes], dim=-1)
        for stage in self.stages:
            vectors = stage(vectors)
        return vectors


def pool(mode: str, hidden: Tensor, mask: Tensor) -> Tensor:
    """One vector a row. hidden: float32 [rows, length, width]; mask: [rows, length]."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    lengths = weights.sum(dim=1).clamp(min=1e-9)
    match mode:
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            last = mask.sum(dim=1) - 1
            return hidden[torch.arange(len(hidden), device=hidden.device), last]
        case "max":
            return hidden.masked_fill(weights == 0, float("-inf")).max(dim=1).values
        case "mean":
            return (hidden * weights).sum(dim=1) / lengths
        case "mean_sqrt_len_tokens":
            return (hidden * weights).sum(dim=1) / lengths.sqrt()
        case "weightedmean":  # later tokens weigh more: 1, 2, 3 …
            weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
            return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        case _:
            msg = f"the pooling mode {mode!r} is not known"
            raise ModelLoadError(msg)


def read_embedding_head(config: EngineConfig, *, width: int, device: torch.device) -> EmbeddingHead:
    """The head of a model whose transformer makes vectors of `width`.

    Raises ModelLoadError where neither the model's files nor the catalog say how it pools, where
    they disagree, and for everything unknown.
    """
    modes, stages, dimensions, normalizes = _parts(config, width, device)
    own = read_json(config.model / "config_sentence_transformers.json").get("truncate_dim")
    if own is not None:  # its publisher cuts every vector
        dimensions = min(int(own), dimensions)
        stages += (lambda vectors: vectors[:, :dimensions], *([_normalize] if normalizes else []))
    return EmbeddingHead(
        modes=modes,
        stages=stages,
        dimensions=dimensions,
        smaller_dimensions=_smaller_dimensions(config, dimensions),
        normalizes=normalizes,
    )


def _parts(
    config: EngineConfig, width: int, device: torch.device
) -> tuple[tuple[str, ...], tuple[Stage, ...], int, bool]:
    """Modes, stages, the vectors' length and whether they are normalised."""
    model_dir, pooling = config.model, config.pooling
    modules = modules_of(model_dir)
    if modules is None:
        if pooling is None:
            msg = f"{model_dir} has no modules.json, so the catalog must name its pooling"
            raise ModelLoadError(msg)
        _known_modes((pooling,), "the catalog")
        return (pooling,), (_normalize,), width, True
    names = [_class_name(module) for module in modules]
    if names[:2] != ["Transformer", "Pooling"]:
        msg = f"{model_dir}: expected Transformer and Pooling first in modules.json, found {names}"
        raise ModelLoadError(msg)
    modes = _pooling_modes(modules[1].folder / "config.json")
    if not pools_prompts(model_dir) and any(prompts_of(model_dir).values()):
        msg = f"{model_dir}: leaving the prompt out of the pooling is not supported"
        raise ModelLoadError(msg)
    if pooling is not None and (pooling,) != modes:
        msg = f"the catalog says pooling {pooling!r}, but {model_dir} says {', '.join(modes)}"
        raise ModelLoadError(msg)
    dimensions = width * len(modes)
    stages: list[Stage] = []
    for name, module in zip(names[2:], modules[2:], strict=True):
        stage, dimensions = _stage(name, module.folder, dimensions, device)
        stages.append(stage)
    after = [name for name in names if name != "Dropout"]
    return modes, tuple(stages), dimensions, after[-1] == "Normalize"


def _smaller_dimensions(config: EngineConfig, dimensions: int) -> tuple[int, ...]:
    """What the model's config.json and the catalog list, below the vectors' own length."""
    path = transformer_folder(config.model) / "config.json"
    stated = read_json(path).get("matryoshka_dimensions") or ()
    for size in config.dimensions:
        if not 0 < size <= dimensions:
            msg = f"the catalog lists {size} dimensions, but {config.model} has {dimensions}"
            raise ModelLoadError(msg)
    listed = {int(size) for size in (*stated, *config.dimensions)}
    return tuple(sorted(size for size in listed if 0 < size < dimensions))


def _class_name(module: ModuleEntry) -> str:
    if not module.type.startswith("sentence_transformers."):
        msg = f"modules.json asks for {module.type}, which is not part of sentence-transformers"
        raise ModelLoadError(msg)
    return module.type.rsplit(".", 1)[-1]


def _pooling_modes(path: Path) -> tuple[str, ...]:
    config = read_json(path)
    known = {*_SWITCHES, "word_embedding_dimension", "embedding_dimension", "pooling_mode"}
    _refuse_unknown(path, config, known | {"include_prompt"})
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for switch, mode in _SWITCHES.items() if config.get(switch)]
        if not stated:
            msg = f"{path} names no pooling mode"
            raise ModelLoadError(msg)
    modes = (stated,) if isinstance(stated, str) else tuple(stated)
    _known_modes(modes, str(path))
    return modes


def _known_modes(modes: tuple[str, ...], source: str) -> None:
    unknown = [mode for mode in modes if mode not in _SWITCHES.values()]
    if unknown:
        msg = f"{source} asks for the pooling mode {unknown[0]!r}, which is not known"
        raise ModelLoadError(msg)


def _stage(name: str, folder: Path, dimensions: int, device: torch.device) -> tuple[Stage, int]:
    """One part after the pooling, and the length of the vectors it makes."""
    path = folder / "config.json"
    config = read_json(path)
    match name:
        case "Normalize":
            _refuse_features(path, config)
            return _normalize, dimensions
        case "Dropout":  # does nothing outside training
            return (lambda x: x), dimensions
        case "Dense":
            return _dense(folder, config, device), int(config["out_features"])
        case "LayerNorm":
            _refuse_unknown(path, config, {"dimension"})
            weights = _weights(folder, device)
            weight, bias = weights["norm.weight"], weights["norm.bias"]
            return (
                lambda x: functional.layer_norm(x, weight.shape, weight, bias),
                dimensions,
            )
        case _:
            msg = f"modules.json asks for a {name} module, which is not supported"
            raise ModelLoadError(msg)


def _normalize(vectors: Tensor) -> Tensor:
    return functional.normalize(vectors, p=2, dim=-1)


def _dense(folder: Path, config: dict[str, Any], device: torch.device) -> Stage:
    path = folder / "config.json"
    _refuse_features(
        path, config, {"in_features", "out_features", "bias", "activation_function", "use_residual"}
    )
    if config.get("use_residual"):
        msg = f"{path}: use_residual is not supported"
        raise ModelLoadError(msg)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rsplit(".", 1)[-1])
    if activation is None or not name.startswith("torch.nn."):
        msg = f"{path}: the activation {name!r} is not supported"
        raise ModelLoadError(msg)
    weights = _weights(folder, device)
    weight, bias = weights["linear.weight"], weights.get("linear.bias")
    return lambda x: in_groups(lambda rows: activation(functional.linear(rows, weight, bias)), x)


def _weights(folder: Path, device: torch.device) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if not path.is_file():
        msg = f"{folder} holds no model.safetensors (pickled weights are never read)"
        raise ModelLoadError(msg)
    return {name: tensor.to(device).float() for name, tensor in load_file(str(path)).items()}


def _refuse_features(path: Path, config: dict[str, Any], known: set[str] | None = None) -> None:
    """Parts work on the pooled vector; one that is told to work on another feature is refused."""
    features = {"module_input_name", "module_output_name"}
    _refuse_unknown(path, config, features | (known or set()))
    for name in features:
        if config.get(name) not in (None, "sentence_embedding"):
            msg = f"{path}: {name} {config[name]!r} is not supported"
            raise ModelLoadError(msg)


def _refuse_unknown(path: Path, config: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        msg = f"{path}: the option {unknown[0]!r} is not known"
        raise ModelLoadError(msg)
