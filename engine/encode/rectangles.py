"""How do the rows of a pack reach a head that wants rectangles, in few calls?

On a CPU each run of equal length is one, as it lies. A device waits for every launch, however small
the work, and a pack may hold hundreds of lengths: there, texts of like length share a rectangle.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.heads import Head
from engine.transfer import upload

_SHORTEST = 0.8  # of the longest in its rectangle: at most a fifth of it is padding


def rectangles(lengths: Sequence[int]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Where in the pack each cell's row lies, and 1 for a token, 0 for padding: [n, longest] both.

    Texts stay in order; a padded cell names some row of its own text.
    """
    first = start = 0
    while first < len(lengths):
        longest = lengths[first]
        end = first + 1
        while end < len(lengths) and _SHORTEST * longest <= lengths[end] <= longest:
            end += 1
        own = np.array(lengths[first:end])[:, None]
        begins = start + np.cumsum(own, axis=0) - own
        cells = np.arange(longest)
        yield begins + np.minimum(cells, own - 1), (cells < own).astype(np.int64)
        start += int(own.sum())
        first = end


def in_rectangles(
    head: Head, hidden: Tensor, ids: Tensor, lengths: Sequence[int]
) -> Iterator[Tensor]:
    """What the head makes of each rectangle: [n, dimensions], or [1, tokens, labels].

    hidden: [tokens, width]; ids: [tokens]; rows behind the last text belong to nobody.
    """
    for places, mask in rectangles(lengths):
        where, shown = upload(torch.from_numpy(np.stack([places, mask])), hidden.device)
        made = head(hidden[where], ids[where], shown)
        if made.dim() == 3:
            tokens = upload(torch.from_numpy(np.flatnonzero(mask)), hidden.device)
            made = made.flatten(0, 1)[tokens].unsqueeze(0)
        yield made
