"""What does a row that a head made say? Pure functions on numpy arrays; no torch here."""

from enum import StrEnum
from typing import assert_never

import numpy as np
from numpy.typing import NDArray


class Activation(StrEnum):
    """What makes scores of logits."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


def scores(logits: NDArray[np.floating], activation: Activation) -> NDArray[np.float32]:
    """logits: [..., labels] → scores of the same shape, computed in float64."""
    wide = logits.astype(np.float64)
    match activation:
        case Activation.IDENTITY:
            made = wide
        case Activation.SIGMOID:
            made = 0.5 * (1 + np.tanh(0.5 * wide))  # the usual form overflows far below zero
        case Activation.SOFTMAX:
            powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
            made = powers / powers.sum(axis=-1, keepdims=True)
        case unreachable:
            assert_never(unreachable)
    return made.astype(np.float32)


def cut(
    vector: NDArray[np.floating], dimensions: int | None, *, normalizes: bool
) -> NDArray[np.float32]:
    """The first `dimensions` of a vector, of length 1 again where the model's vectors are; all of
    it for None. A copy, so that a result kept for long does not keep its whole batch.
    """
    short = vector[:dimensions].astype(np.float32)
    if normalizes and dimensions is not None and dimensions < len(vector):
        # A vector of nothing but zeros stays one, as torch's normalize leaves it.
        short /= max(float(np.linalg.norm(short)), 1e-12)
    return short
