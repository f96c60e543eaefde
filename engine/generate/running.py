"""What does a batch of answers in the making hold on the device?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.generate.answer import Answer
from engine.model.load import Decoder
from engine.request import GenerateRequest


class RunningBatch:
    """Left-padded prompts, their keys and values, and the answers so far, row by row."""

    def __init__(
        self, decoder: Decoder, requests: Sequence[GenerateRequest], prefill_tokens: int
    ) -> None:
        self._decoder = decoder
        self._prefill_tokens = prefill_tokens
        self.answers = [Answer(request, decoder) for request in requests]
        ids, mask = _pad(requests, decoder.pad_id)
        self._ids = ids.to(decoder.device)  # [rows, width]; the new token alone once decoding
        self._mask = mask.to(decoder.device)  # [rows, width + decoded]
        # Each row's own count of tokens, so that padding moves no position.
        self._positions = (self._mask.cumsum(dim=-1) - 1).clamp(min=0)  # as _ids
        self._cache = decoder.new_cache()
        self._width = ids.shape[1]
        self._filled = 0  # columns whose keys and values stand in the cache
        self.last_cost = 0  # padded tokens of the last forward

    @property
    def prefilling(self) -> bool:
        """Whether some of the prompts is still to be computed."""
        return self._filled < self._width

    def forward(self) -> Tensor | None:
        """Compute the next columns: a piece of the prompts, or the tokens fed last.

        Returns float32 [rows, vocab] for what follows, None while prompts are incomplete.
        """
        columns = self._ids.shape[1]
        if self.prefilling:
            columns = max(1, self._prefill_tokens // len(self.answers))
            columns = min(columns, self._width - self._filled)
        start = self._filled if self.prefilling else 0
        end = self._filled + columns
        logits = self._decoder.logits(
            self._ids[:, start : start + columns],
            self._mask[:, :end],
            self._positions[:, start : start + columns],
            self._cache,
        )
        self._filled = end
        self.last_cost = len(self.answers) * columns
        return None if self.prefilling else logits

    def feed(self, tokens: Sequence[int]) -> None:
        """Set each row's new token, to be computed by the next forward."""
        self._ids = torch.tensor(tokens, device=self._decoder.device)[:, None]
        self._positions = self._positions[:, -1:] + 1
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], dim=-1)

    def keep(self, rows: Sequence[int]) -> None:
        """Let all other rows leave."""
        self.answers = [self.answers[row] for row in rows]
        index = torch.tensor(rows, device=self._decoder.device)
        self._ids = self._ids[index]
        self._mask = self._mask[index]
        self._positions = self._positions[index]
        self._cache.batch_select_indices(index)

    def drop(self) -> None:
        """Let go of everything on the device."""
        del self._ids, self._mask, self._positions, self._cache


def _pad(requests: Sequence[GenerateRequest], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [rows, longest], padded on the left."""
    width = max(len(request.prompt) for request in requests)
    ids = torch.full((len(requests), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    return ids, mask
