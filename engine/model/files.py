"""Where does each fact stand in a model folder? Only the publisher's own files are asked.

A folder in sentence-transformers' layout lists its parts in modules.json, the transformer first;
any other folder is the transformer itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

# Tokenizers without a limit of their own write a huge number (1e30) for it.
_NO_LIMIT = 10**9

# These count positions from padding_idx + 1, so their table is that much longer than their texts.
_OFFSET_POSITIONS = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One part of modules.json: its class's full name and its folder."""

    type: str
    folder: Path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. ModelLoadError for anything else."""
    if not path.is_file():
        return {}
    content = _parse(path)
    if not isinstance(content, dict):
        msg = f"{path} holds no JSON object"
        raise ModelLoadError(msg)
    return content


def modules_of(model_dir: Path) -> tuple[ModuleEntry, ...] | None:
    """The parts that modules.json lists, in order; None where there is no such file."""
    path = model_dir / "modules.json"
    if not path.is_file():
        return None
    content = _parse(path)
    try:
        entries = tuple(
            ModuleEntry(str(entry["type"]), model_dir / entry["path"])
            for entry in sorted(content, key=lambda entry: int(entry["idx"]))
        )
    except (TypeError, KeyError, ValueError) as error:
        msg = f"{path} is not a list of modules: {error}"
        raise ModelLoadError(msg) from error
    if not entries:
        msg = f"{path} lists no module"
        raise ModelLoadError(msg)
    return entries


def transformer_folder(model_dir: Path) -> Path:
    """The folder of the transformer's config, weights and tokenizer."""
    modules = modules_of(model_dir)
    return modules[0].folder if modules else model_dir


def sentence_config(model_dir: Path) -> dict[str, Any]:
    """What sentence-transformers wrote about the transformer; empty for other layouts."""
    return read_json(transformer_folder(model_dir) / "sentence_bert_config.json")


def prompts_of(model_dir: Path) -> dict[str, str]:
    """What the model's publisher would have put before a text, by name."""
    stated = read_json(model_dir / "config_sentence_transformers.json").get("prompts") or {}
    return {str(name): str(prompt) for name, prompt in stated.items()}


def default_prompt_name(model_dir: Path) -> str | None:
    """The prompt that stands before every text for which no other is asked; None for none."""
    name = read_json(model_dir / "config_sentence_transformers.json").get("default_prompt_name")
    return None if name is None else str(name)


def pools_prompts(model_dir: Path) -> bool:
    """Whether a text's vector is pooled from its prompt's tokens too, as is usual."""
    return all(
        read_json(module.folder / "config.json").get("include_prompt", True)
        for module in modules_of(model_dir) or ()
        if module.type.endswith(".Pooling")
    )


def context_length_of(model_dir: Path) -> int | None:
    """Most tokens of a text: the least of what the model's files say; None where they do not.

    sentence-transformers' own maximum stands instead of the tokenizer's.
    """
    folder = transformer_folder(model_dir)
    own = sentence_config(model_dir).get("max_seq_length")
    if own is None:
        own = read_json(folder / "tokenizer_config.json").get("model_max_length")
    limits = [own, position_limit(model_dir)]
    known = [int(limit) for limit in limits if limit is not None and limit < _NO_LIMIT]
    return min(known, default=None)


def position_limit(model_dir: Path) -> int | None:
    """Most positions that the transformer itself can tell apart; None where it has no limit."""
    config = read_json(transformer_folder(model_dir) / "config.json")
    config = config.get("text_config") or config
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
    found = next((config[name] for name in names if isinstance(config.get(name), int)), None)
    if found is None or found <= 0:
        return None
    if config.get("model_type") in _OFFSET_POSITIONS:
        return int(found) - int(config.get("pad_token_id", 1)) - 1
    return int(found)


def first_position(model_dir: Path) -> int:
    """The position of a text's first token."""
    config = read_json(transformer_folder(model_dir) / "config.json")
    if config.get("model_type") not in _OFFSET_POSITIONS:
        return 0
    return int(config.get("pad_token_id", 1)) + 1


def _parse(path: Path) -> Any:  # noqa: ANN401 whatever JSON the file holds; the callers check it
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as JSON: {error}"
        raise ModelLoadError(msg) from error
