"""Which number decides a draw?

Keyed by (seed, choice, step) with a counter-based generator: neighbours, retries and restarts
change no sample.
"""

import numpy as np

_WORD = (1 << 64) - 1


def uniform(seed: int, choice: int, step: int) -> float:
    """In [0, 1)."""
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    counter = np.array([step, 0, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
