"""How alike are embeddings? By the cosine, whether the model's vectors are of length 1 or not."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import Embedding

Rows = NDArray[np.float64]  # [rows, dims]


def directions(vectors: Sequence[Embedding]) -> Rows:
    """Each vector made of length 1; a vector of zeros stays one."""
    return of_length_1(np.stack([each.vector for each in vectors]).astype(np.float64))


def of_length_1(rows: Rows) -> Rows:
    """Each row made of length 1."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1.0)
