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

from engine.errors import ModelLoadError
from engine.model.files import ModuleEntry, default_prompt, modules_of, read_json

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
class Head:
    """All that follows the transformer; computes in float32."""

    modes: tuple[str, ...]
    stages: tuple[Stage, ...]
    dimensions: int

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden: [rows, length, width]; mask: [rows, length], 1 for a token, 0 for padding on
        the right. Returns float32 [rows, dimensions].
        """
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


def read_head(model_dir: Path, *, width: int, pooling: str | None, device: torch.device) -> Head:
    """The head of a model whose transformer makes vectors of `width`.

    `pooling` is what the catalog says for a model whose files say nothing. Raises ModelLoadError
    where neither says it, where they disagree, and for everything unknown.
    """
    modules = modules_of(model_dir)
    if modules is None:
        if pooling is None:
            msg = f"{model_dir} has no modules.json, so the catalog must name its pooling"
            raise ModelLoadError(msg)
        _known_modes((pooling,), "the catalog")
        return Head(modes=(pooling,), stages=(_normalize,), dimensions=width)
    names = [_class_name(module) for module in modules]
    if names[:2] != ["Transformer", "Pooling"]:
        msg = f"{model_dir}: expected Transformer and Pooling first in modules.json, found {names}"
        raise ModelLoadError(msg)
    modes = _pooling_modes(
        modules[1].folder / "config.json", has_prompt=bool(default_prompt(model_dir))
    )
    if pooling is not None and (pooling,) != modes:
        msg = f"the catalog says pooling {pooling!r}, but {model_dir} says {', '.join(modes)}"
        raise ModelLoadError(msg)
    dimensions = width * len(modes)
    stages: list[Stage] = []
    for name, module in zip(names[2:], modules[2:], strict=True):
        stage, dimensions = _stage(name, module.folder, dimensions, device)
        stages.append(stage)
    return Head(modes=modes, stages=tuple(stages), dimensions=dimensions)


def _class_name(module: ModuleEntry) -> str:
    if not module.type.startswith("sentence_transformers."):
        msg = f"modules.json asks for {module.type}, which is not part of sentence-transformers"
        raise ModelLoadError(msg)
    return module.type.rsplit(".", 1)[-1]


def _pooling_modes(path: Path, *, has_prompt: bool) -> tuple[str, ...]:
    config = read_json(path)
    known = {*_SWITCHES, "word_embedding_dimension", "embedding_dimension", "pooling_mode"}
    _refuse_unknown(path, config, known | {"include_prompt"})
    if config.get("include_prompt", True) is False and has_prompt:
        msg = f"{path}: leaving the prompt out of the pooling is not supported"
        raise ModelLoadError(msg)
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
    return lambda x: activation(functional.linear(x, weight, bias))


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
