"""How do logits come from hidden states? By the model's own code after its transformer.

Every architecture has a head of its own (a pooler here, a projection there, the last token that is
no padding). None is written anew: the model's own forward runs with its transformer replaced by a
module that hands it the hidden states, and is compared at load with the model as it is.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from engine.config import EngineConfig, Kind
from engine.errors import ModelLoadError
from engine.model.files import modules_of, prompts_of, read_json, transformer_folder
from engine.model.rows import in_groups
from engine.model.scores import Activation


@dataclass(frozen=True, slots=True)
class LabelHead:
    """The code that follows the transformer of a classifying model, of texts or of tokens."""

    labels: tuple[str, ...]
    activation: Activation
    whole: Any = field(repr=False)  # the PreTrainedModel, its transformer replaced by _Given
    # Models that find the last token by its padding id refuse batches where they have none.
    row_by_row: bool = False
    dimensions: None = None
    smaller_dimensions: tuple[int, ...] = ()
    normalizes: bool = False

    def __call__(self, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """As `heads.Head` says: float32 [n, labels], or [n, length, labels] for tokens."""
        if self.row_by_row:
            lengths = mask.sum(dim=1).tolist()
            rows = [
                self._logits(
                    hidden[n : n + 1, :length], ids[n : n + 1, :length], mask[n : n + 1, :length]
                )
                for n, length in enumerate(lengths)
            ]
            return torch.cat(rows)
        return in_groups(self._logits, hidden, ids, mask)

    def _logits(self, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        output = self.whole(input_ids=ids, attention_mask=mask, inputs_embeds=hidden)
        logits: Tensor = output.logits
        return logits.float()


def read_label_head(config: EngineConfig, model: Any) -> LabelHead:  # noqa: ANN401 a PreTrainedModel
    """The head of a classifying model. Raises ModelLoadError where it cannot be run rightly."""
    if config.dimensions:
        msg = f"{config.model} makes no vectors, so the catalog cannot name their dimensions"
        raise ModelLoadError(msg)
    base = model.base_model
    if base is model:
        msg = f"{type(model).__name__} does not keep its transformer apart from its head"
        raise ModelLoadError(msg)
    whole = copy.copy(model)  # shares all modules; only the table of them is its own
    whole._modules = {**model._modules, model.base_model_prefix: _Given(base)}
    named: dict[int, str] = model.config.id2label
    head = LabelHead(
        labels=tuple(str(named[index]) for index in range(len(named))),
        activation=_activation(config, model),
        whole=whole,
        row_by_row=config.kind is not Kind.TOKEN_CLASSIFY and _pad_id(model) is None,
    )
    _check(head, model)
    return head


class _Given(Module):
    """Stands where the transformer was: its hidden states arrive as `inputs_embeds`."""

    def __init__(self, base: Any) -> None:  # noqa: ANN401 a PreTrainedModel
        super().__init__()
        self.pooler = getattr(base, "pooler", None)
        # ALBERT's pooler is a bare linear layer over the first token.
        self.pooler_activation = getattr(base, "pooler_activation", None)

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Any:  # noqa: ANN401 a ModelOutput
        pooled = None
        if self.pooler is not None:
            pooled = (
                self.pooler(inputs_embeds)
                if self.pooler_activation is None
                else self.pooler_activation(self.pooler(inputs_embeds[:, 0]))
            )
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=inputs_embeds, pooler_output=pooled
        )


@torch.inference_mode()
def _check(head: LabelHead, model: Any) -> None:  # noqa: ANN401 a PreTrainedModel
    """Refuse a head that does not give on the model's hidden states what the model gives."""
    device, pad_id = model.device, _pad_id(model)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(5, 5 + 12, device=device).remainder(vocab_size).view(2, 6)
    ids[ids == pad_id] += 1 if pad_id == 0 else -1
    mask = torch.ones_like(ids)
    if pad_id is None:
        ids, mask = ids[:1], mask[:1]
    else:
        ids[1, 4:], mask[1, 4:] = pad_id, 0
    expected = model(input_ids=ids, attention_mask=mask).logits.float()
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    try:
        found = head(hidden, ids, mask)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        msg = f"the head of {type(model).__name__} cannot be run by itself: {error}"
        raise ModelLoadError(msg) from error
    if found.shape[-1] != len(head.labels):
        msg = f"{type(model).__name__} makes {found.shape[-1]} logits for {len(head.labels)} labels"
        raise ModelLoadError(msg)
    if expected.dim() == 3:  # what stands on padding is nobody's
        found, expected = found[mask == 1], expected[mask == 1]
    if found.shape != expected.shape or not torch.allclose(
        found, expected, rtol=1e-3, atol=1e-3, equal_nan=True
    ):
        msg = f"the head of {type(model).__name__} differs from the whole model's, run by itself"
        raise ModelLoadError(msg)


def _pad_id(model: Any) -> int | None:  # noqa: ANN401 a PreTrainedModel
    pad_id: int | None = model.config.get_text_config().pad_token_id
    return pad_id


def _activation(config: EngineConfig, model: Any) -> Activation:  # noqa: ANN401 a PreTrainedModel
    if config.kind is Kind.TOKEN_CLASSIFY:
        return Activation.SOFTMAX
    if config.kind is Kind.SCORE:
        return _cross_encoder_activation(config.model, int(model.config.num_labels))
    return _pipeline_activation(model.config.problem_type, int(model.config.num_labels))


def _pipeline_activation(problem_type: str | None, labels: int) -> Activation:
    """As transformers' text-classification pipeline decides."""
    if problem_type == "regression":
        return Activation.IDENTITY
    if problem_type == "multi_label_classification" or labels == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX


_TORCH_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": Activation.IDENTITY,
    "torch.nn.modules.activation.Sigmoid": Activation.SIGMOID,
    "torch.nn.Identity": Activation.IDENTITY,
    "torch.nn.Sigmoid": Activation.SIGMOID,
}


def _cross_encoder_activation(model_dir: Path, labels: int) -> Activation:
    """As sentence-transformers' CrossEncoder decides; what else its files ask for is refused."""
    names = [module.type.rsplit(".", 1)[-1] for module in modules_of(model_dir) or ()]
    if names not in ([], ["Transformer"]):
        msg = f"{model_dir}: a cross-encoder of the modules {names} is not supported"
        raise ModelLoadError(msg)
    if any(prompts_of(model_dir).values()):
        msg = f"{model_dir}: prompts before pairs of texts are not supported"
        raise ModelLoadError(msg)
    own = read_json(model_dir / "config_sentence_transformers.json")
    transformer = read_json(transformer_folder(model_dir) / "config.json")
    stated = (
        own.get("activation_fn")
        or (transformer.get("sentence_transformers") or {}).get("activation_fn")
        or transformer.get("sbert_ce_default_activation_function")
    )
    if stated is None:
        return Activation.SIGMOID if labels == 1 else Activation.IDENTITY
    if stated not in _TORCH_ACTIVATIONS:
        msg = f"{model_dir}: the activation {stated!r} is not supported"
        raise ModelLoadError(msg)
    return _TORCH_ACTIVATIONS[stated]
