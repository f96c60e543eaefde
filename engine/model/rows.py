"""How many rows go through a head at once, so that neighbours change no bit of one?"""

from collections.abc import Callable

import torch
from torch import Tensor

# A CPU's product of matrices gives a row the same bits for any multiple of four rows; not for one,
# two or three, which take other kernels.
_GROUP = 4


def in_groups(compute: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """compute(*arguments), each of them filled up by copies of its last row to a multiple of four.

    arguments: [rows, …] each; returns [rows, …].
    """
    count = len(arguments[0])
    missing = -count % _GROUP
    if missing:
        arguments = tuple(
            torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) for rows in arguments
        )
    return compute(*arguments)[:count]
