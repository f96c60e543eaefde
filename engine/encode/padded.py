"""How do texts run on a model that needs rectangles? In padded batches of like length."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.encode.forward import Allows
from engine.encode.texts import Text
from engine.model.load import Encoder
from engine.plan.waiting import Waiting
from engine.transfer import download, upload

# Most of a batch that may be padding. Only the few texts that have none of like length beside them
# run in batches so small that a larger one would have been quicker.
_MOST_PADDING = 0.08


class Padded:
    """Batches of one rectangle each, padded on the right."""

    path = "padded"

    def __init__(self, encoder: Encoder, *, max_rows: int) -> None:
        self._encoder = encoder
        self._max_rows = max_rows

    def take(self, waiting: Waiting[Text], allows: Allows) -> list[Text]:
        """The next batch, of one length bucket."""

        def fits(batch: Sequence[Text]) -> bool:
            longest = len(batch[0].tokens)
            cost = longest * len(batch)
            tokens = sum(len(text.tokens) for text in batch)
            return (
                len(batch) <= self._max_rows
                and tokens >= cost * (1 - _MOST_PADDING)
                and allows(cost, longest)
            )

        return waiting.take(fits)

    def costs(self, batch: Sequence[Text]) -> list[int]:
        """The longest text's tokens for each."""
        return [len(batch[0].tokens)] * len(batch)

    def rows(self, batch: Sequence[Text]) -> list[NDArray[np.float32]]:
        """What the head makes of each text."""
        device = self._encoder.device
        ids, mask = (upload(t, device) for t in _rectangle(batch, self._encoder.pad_id))
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._encoder.has_types:
            inputs["token_type_ids"] = upload(_types(batch, ids.shape[1]), device)
        made = download(self._encoder.head(self._encoder.hidden(**inputs), ids, mask))
        if made.ndim == 2:
            return list(made)
        return [row[: len(text.tokens)] for row, text in zip(made, batch, strict=True)]


def _rectangle(batch: Sequence[Text], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [rows, longest]."""
    shape = (len(batch), max(len(text.tokens) for text in batch))
    ids = np.full(shape, pad_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, text in enumerate(batch):
        ids[row, : len(text.tokens)] = text.tokens
        mask[row, : len(text.tokens)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _types(batch: Sequence[Text], longest: int) -> Tensor:
    """int64 [rows, longest]: 1 for tokens of a pair's second text."""
    types = np.zeros((len(batch), longest), dtype=np.int64)
    for row, text in enumerate(batch):
        if text.first is not None:
            types[row, text.first : len(text.tokens)] = 1
    return torch.from_numpy(types)
