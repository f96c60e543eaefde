"""What follows the transformer, and turns its hidden states into what the model is asked for?

    head = read_head(config, model, device)  # model: as loaded, before anything is plugged into it
    rows = head(hidden, ids, mask)  # hidden: what model.base_model made of ids

A row of an embedding model's head is its vector, a row of the others' is logits; `scores.cut` and
`scores.scores` make of them what is answered.
"""

from typing import Any, Protocol, assert_never

import torch
from torch import Tensor

from engine.config import EngineConfig, Kind
from engine.errors import ModelLoadError
from engine.model.classify import read_label_head
from engine.model.pooling import read_embedding_head
from engine.model.scores import Activation


class Head(Protocol):
    """All that follows the transformer."""

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None where it makes logits."""
        ...

    @property
    def smaller_dimensions(self) -> tuple[int, ...]:
        """Lengths that the vectors may be cut to, ascending; empty where none is listed."""
        ...

    @property
    def normalizes(self) -> bool:
        """Whether its vectors are of length 1, so that a cut one must be made so again."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the logits, in their order; empty where it makes vectors."""
        ...

    @property
    def activation(self) -> Activation:
        """What makes scores of its logits; IDENTITY where it makes vectors."""
        ...

    def __call__(self, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """hidden: [n, length, width]; ids, mask: int64 [n, length], 1 for a token and 0 for
        padding on the right. Returns float32: [n, dimensions], [n, labels] or, where tokens are
        classified, [n, length, labels] (rows of padding are then to be left out).

        A row of the result depends on its own row alone, to the bit on a CPU.
        """
        ...


def read_head(config: EngineConfig, model: Any, device: torch.device) -> Head:  # noqa: ANN401 a PreTrainedModel
    """The head of a loaded model, for every kind but GENERATE.

    `model` is AutoModel's for EMBED, AutoModelForSequenceClassification's for CLASSIFY and SCORE,
    AutoModelForTokenClassification's for TOKEN_CLASSIFY. Raises ModelLoadError for what its files
    ask for and is not known here.
    """
    match config.kind:
        case Kind.EMBED:
            width = int(model.config.get_text_config().hidden_size)
            return read_embedding_head(config, width=width, device=device)
        case Kind.CLASSIFY | Kind.SCORE | Kind.TOKEN_CLASSIFY:
            return read_label_head(config, model)
        case Kind.GENERATE:
            msg = "a generating model has no such head"
            raise ModelLoadError(msg)
        case unreachable:
            assert_never(unreachable)
