"""How does a model folder become a model on a device?

Weights are safetensors, code is transformers' own, nothing is fetched.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, Kind, Quantize
from engine.errors import ModelLoadError
from engine.model.files import (
    context_length_of,
    first_position,
    position_limit,
    sentence_config,
    transformer_folder,
)
from engine.model.grammar import Grammars
from engine.model.heads import Head, read_head
from engine.model.int8 import quantize_
from engine.model.linear import prepack_
from engine.model.pooling import EmbeddingHead
from engine.model.scaled import scale_
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What the tokenizer is compared on with transformers' own: cases, spaces, marks, other scripts.
_PROBES = ["Hello, World!  Two  spaces", "naïve café — 東京 🙂", "1234.5 tokens\n\tx_y", "don't"]


@dataclass(frozen=True, slots=True)
class Encoder:
    """A transformer that reads token ids, and the head that makes of it what is asked for."""

    model: Any  # the transformer, a PreTrainedModel
    whole: Any  # the model as loaded, its head included
    accepts: frozenset[str]  # names of the transformer's arguments
    head: Head
    device: torch.device
    pad_id: int
    vocab_size: int
    context_length: int
    first_position: int  # of a text's first token
    has_types: bool  # whether tokens of a pair's second text are marked

    def hidden(self, **inputs: Any) -> Tensor:  # noqa: ANN401 tensors, and the layout of a pack
        """The last hidden states, [rows, length, width], of ids [rows, length]."""
        options = {"use_cache": False} if "use_cache" in self.accepts else {}
        hidden: Tensor = self.model(**inputs, **options).last_hidden_state
        return hidden


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that continues left-padded token ids."""

    model: Any  # a transformers PreTrainedModel
    accepts: frozenset[str]  # names of its forward's arguments
    tokenizer: Tokenizer
    device: torch.device
    pad_id: int
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    grammars: Grammars

    def new_cache(self) -> Cache:
        """An empty cache of keys and values, of the layer kinds that this model needs."""
        return DynamicCache(config=self.model.config)

    def packed_logits(self, ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Score what follows some of the rows, texts end to end, with no cache of transformers'.

        ids, positions: int64 [rows]; wanted: int64 [those]. Returns [those, vocab].
        """
        options: dict[str, Any] = {}
        if "position_ids" in self.accepts:
            options["position_ids"] = positions[None]
        if "logits_to_keep" in self.accepts:
            options["logits_to_keep"] = wanted
        logits: Tensor = self.model(input_ids=ids[None], use_cache=False, **options).logits[0]
        return logits if "logits_to_keep" in self.accepts else logits[wanted]

    def logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Continue by `ids` and score what follows the last of them; extends `cache` in place.

        ids, positions: int64 [rows, new]; mask: int64 [rows, cached + new]. Returns float32
        [rows, vocab].
        """
        options: dict[str, Any] = {}
        # The argument's name changed between the transformers releases that are supported.
        options["cache" if "cache" in self.accepts else "past_key_values"] = cache
        if "position_ids" in self.accepts:
            options["position_ids"] = positions
        if "logits_to_keep" in self.accepts:
            options["logits_to_keep"] = 1
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1]
        return logits.float()


def load_encoder(config: EngineConfig) -> Encoder:
    """The encoder in a folder. Raises ModelLoadError where it cannot be run rightly."""
    device = _device(config.device)
    _check_sentence_config(config)
    whole = _load(_auto_class(config.kind), config, device)
    tokenizer = Tokenizer.from_dir(config.model)
    _check_tokenizer(config, tokenizer)
    head = read_head(config, whole, device)
    if isinstance(head, EmbeddingHead) and "lasttoken" in head.modes:
        _check_ends(config, whole, tokenizer)
    model = whole if config.kind is Kind.EMBED else whole.base_model
    return Encoder(
        model=model,
        whole=whole,
        accepts=frozenset(inspect.signature(model.forward).parameters),
        head=head,
        device=device,
        pad_id=_pad_id(model),
        vocab_size=_vocab_size(model),
        context_length=_context_length(config),
        first_position=first_position(config.model),
        has_types=getattr(model.config, "type_vocab_size", None) is not None
        and model.config.type_vocab_size > 1
        and "token_type_ids" in inspect.signature(model.forward).parameters,
    )


def load_decoder(config: EngineConfig) -> Decoder:
    """The generating model in a folder. Raises ModelLoadError where it cannot be run rightly."""
    device = _device(config.device)
    model = _load(AutoModelForCausalLM, config, device)
    tokenizer = Tokenizer.from_dir(config.model)
    _check_tokenizer(config, tokenizer)
    eos_ids, vocab_size = _eos_ids(model, tokenizer), _vocab_size(model)
    decoder = Decoder(
        model=model,
        accepts=frozenset(inspect.signature(model.forward).parameters),
        tokenizer=tokenizer,
        device=device,
        pad_id=_pad_id(model),
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        context_length=_context_length(config),
        grammars=Grammars(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids),
    )
    layers = getattr(decoder.new_cache(), "layers", [])
    if not all(hasattr(layer, "batch_select_indices") for layer in layers):
        msg = f"{config.model}: models with recurrent layers are not supported"
        raise ModelLoadError(msg)
    return decoder


def _auto_class(kind: Kind) -> Any:  # noqa: ANN401 transformers' Auto classes share no type
    match kind:
        case Kind.EMBED:
            return AutoModel
        case Kind.CLASSIFY | Kind.SCORE:
            return AutoModelForSequenceClassification
        case Kind.TOKEN_CLASSIFY:
            return AutoModelForTokenClassification
        case Kind.GENERATE:
            return AutoModelForCausalLM
        case unreachable:
            assert_never(unreachable)


def speed_up(model: Any, quantize: Quantize | None) -> None:  # noqa: ANN401 a PreTrainedModel
    """Put faster linear layers in the place of the model's own."""
    match quantize:
        case Quantize.INT8 | Quantize.FP8 if next(model.parameters()).device.type == "cuda":
            scale_(model, quantize)
        case Quantize.INT8:
            quantize_(model)
        case Quantize.FP8:
            log.warning("fp8 is for CUDA devices: the model stays as it is")
            prepack_(model)
        case None:
            prepack_(model)
        case unreachable:
            assert_never(unreachable)


def _load(auto: Any, config: EngineConfig, device: torch.device) -> Any:  # noqa: ANN401 transformers' Auto classes share no type
    if config.dtype not in _DTYPES:
        msg = f"dtype {config.dtype!r} is not one of {', '.join(_DTYPES)}"
        raise ModelLoadError(msg)
    folder = transformer_folder(config.model)
    if not (folder / "config.json").is_file():
        msg = f"{folder} holds no config.json"
        raise ModelLoadError(msg)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet():
            description = AutoConfig.from_pretrained(folder, **options)
            if description.is_encoder_decoder:
                msg = f"{folder}: encoder-decoder models are not supported"
                raise ModelLoadError(msg)
            model, report = auto.from_pretrained(
                folder,
                config=description,
                dtype=_DTYPES[config.dtype],
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        msg = f"{folder} cannot be loaded: {error}"
        raise ModelLoadError(msg) from error
    # transformers fills what the file lacks with random numbers. BERT's pooler is not used here.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        msg = f"{folder}: its weights lack {missing[0]} and {len(missing) - 1} more"
        raise ModelLoadError(msg)
    return model.eval().requires_grad_(requires_grad=False).to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars: they would end up in a worker's log."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        msg = f"device {name!r} is not known: {error}"
        raise ModelLoadError(msg) from error


def _context_length(config: EngineConfig) -> int:
    own = context_length_of(config.model)
    asked = config.context_length
    limit = position_limit(config.model)
    if asked is not None and limit is not None and asked > limit:
        msg = f"context_length {asked} is beyond the {limit} positions of {config.model}"
        raise ModelLoadError(msg)
    if asked is None and own is None:
        msg = f"{config.model} does not say its context length, so the catalog must"
        raise ModelLoadError(msg)
    return asked or own or 0


def _pad_id(model: Any) -> int:  # noqa: ANN401 a PreTrainedModel
    # RoBERTa-likes number positions by counting what is not the padding id, so it must be theirs.
    pad_id = model.config.get_text_config().pad_token_id
    return 0 if pad_id is None else int(pad_id)


def _vocab_size(model: Any) -> int:  # noqa: ANN401 a PreTrainedModel
    return int(model.get_input_embeddings().weight.shape[0])


def _eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:  # noqa: ANN401 a PreTrainedModel
    stated = model.generation_config.eos_token_id
    ids = {stated} if isinstance(stated, int) else set(stated or ())
    if tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return frozenset(ids)


def _check_ends(config: EngineConfig, model: Any, tokenizer: Tokenizer) -> None:  # noqa: ANN401 a PreTrainedModel
    """Refuse vectors made of a last token that is not the one that ends a text."""
    stated = model.config.get_text_config().eos_token_id
    known = {stated} if isinstance(stated, int) else set(stated or ())
    if tokenizer.eos_id is not None:
        known.add(tokenizer.eos_id)
    if tokenizer.encode(["a"])[0][-1] not in known:
        msg = (
            f"{config.model} makes its vectors of the last token, but its tokenizer does not put"
            " the one that ends a text there"
        )
        raise ModelLoadError(msg)


def _check_sentence_config(config: EngineConfig) -> None:
    """Refuse what sentence-transformers could be told about the transformer and we do not do."""
    stated = sentence_config(config.model)
    task, output, module_output = (
        ("feature-extraction", "last_hidden_state", "token_embeddings")
        if config.kind is Kind.EMBED
        else ("sequence-classification", "logits", "scores")
    )
    expected: dict[str, tuple[object, ...]] = {
        "transformer_task": (task,),
        "modality_config": ({"text": {"method": "forward", "method_output_name": output}},),
        "module_output_name": (module_output,),
        "unpad_inputs": (None, False),
    }
    for name, value in stated.items():
        if name in {"max_seq_length", "do_lower_case"} or value in expected.get(name, ({}, None)):
            continue
        msg = f"{config.model}: sentence_bert_config.json sets {name} to {value!r}, not supported"
        raise ModelLoadError(msg)


def _check_tokenizer(config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Warn where transformers would read the tokenizer's files differently than we do."""
    theirs = AutoTokenizer.from_pretrained(
        transformer_folder(config.model), local_files_only=True, trust_remote_code=False
    )
    for probe in _PROBES:
        expected = theirs(probe, add_special_tokens=True, truncation=False)["input_ids"]
        if tokenizer.encode_prompt(probe) != expected:
            log.warning("tokenizer differs from transformers' own", extra={"model": config.model})
            return
