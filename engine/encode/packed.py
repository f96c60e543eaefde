"""How do texts run without padding? Laid end to end in one row, each with positions of its own."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.encode.forward import Allows
from engine.encode.rectangles import in_rectangles
from engine.encode.texts import Text
from engine.model.attention import Pack, rows_of
from engine.model.load import Encoder
from engine.plan.waiting import Waiting
from engine.transfer import download, upload

# Packs are filled up to a multiple of this by rows that belong to nobody. oneDNN builds a program
# for every number of rows it meets (0.5–1 ms a layer shape, the last 1,024 are kept), and products
# of fewer than twelve rows may round otherwise than those of many.
ROWS = 16


class Packed:
    """Batches of texts laid end to end."""

    path = "packed"

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def take(self, waiting: Waiting[Text], allows: Allows) -> list[Text]:
        """The next batch, of whatever lengths."""
        return waiting.take_pack(allows)

    def costs(self, batch: Sequence[Text]) -> list[int]:
        """Each text's own tokens."""
        return [len(text.tokens) for text in batch]

    def rows(self, batch: Sequence[Text]) -> list[NDArray[np.float32]]:
        """What the head makes of each text. Texts of equal length should stand together."""
        lengths = [len(text.tokens) for text in batch]
        pack = Pack.of(lengths, self._encoder.device)
        ids, hidden = self.hidden(batch, pack)
        if self._encoder.device.type == "cpu":
            made = list(self._in_runs(hidden[0], ids[0], pack))
        else:
            made = list(in_rectangles(self._encoder.head, hidden[0], ids[0], lengths))
        if made[0].dim() == 2:
            return list(download(torch.cat(made)))
        tokens = download(torch.cat([scores.flatten(0, 1) for scores in made]))
        return np.split(tokens, np.cumsum(lengths[:-1]))

    def _in_runs(self, hidden: Tensor, ids: Tensor, pack: Pack) -> Iterator[Tensor]:
        """What the head makes of each run. hidden: [tokens, width]; ids: [tokens]."""
        for run in pack.runs:
            own = rows_of(ids, run)
            yield self._encoder.head(rows_of(hidden, run), own, torch.ones_like(own))

    def hidden(self, batch: Sequence[Text], pack: Pack) -> tuple[Tensor, Tensor]:
        """Ids and hidden states, [1, tokens] and [1, tokens, width], rows of nobody last."""
        total = sum(len(text.tokens) for text in batch)
        inputs = upload(self.inputs(batch, total + -total % ROWS), self._encoder.device)
        return inputs[0], self.run(inputs, pack)

    def inputs(self, batch: Sequence[Text], room: int) -> Tensor:
        """Ids, positions and types on the host, int64 [3, 1, room]."""
        total = sum(len(text.tokens) for text in batch)
        inputs = np.zeros((3, 1, room), dtype=np.int64)
        inputs[0, 0, :total] = np.fromiter(
            chain.from_iterable(text.tokens for text in batch), dtype=np.int64, count=total
        )
        inputs[1] = self._encoder.first_position
        start = 0
        for text in batch:
            end = start + len(text.tokens)
            inputs[1, 0, start:end] += np.arange(len(text.tokens))
            if text.first is not None:
                inputs[2, 0, start + text.first : end] = 1
            start = end
        return torch.from_numpy(inputs)

    def run(self, inputs: Tensor, pack: Pack) -> Tensor:
        """Hidden states, [1, tokens, width], of what `inputs` makes, on the device."""
        ids, positions, types = inputs
        named = {"input_ids": ids, "position_ids": positions}
        if self._encoder.has_types:
            named["token_type_ids"] = types
        return self._encoder.hidden(**named, pack=pack)
