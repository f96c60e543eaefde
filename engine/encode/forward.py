"""What must a way of computing batches of texts offer? There are two: packed and padded."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.encode.texts import Text
from engine.plan.waiting import Waiting

Allows = Callable[[int, int], bool]  # tokens of a batch, padding included; tokens of its longest


class Forward(Protocol):
    """Batches of texts into what the model's head makes of each."""

    @property
    def path(self) -> str:
        """Its name in the engine's status."""
        ...

    def take(self, waiting: Waiting[Text], allows: Allows) -> list[Text]:
        """The next batch, longest text first; empty where nothing waits, one text at least."""
        ...

    def costs(self, batch: Sequence[Text]) -> list[int]:
        """Tokens that each text adds to the batch, padding included."""
        ...

    def rows(self, batch: Sequence[Text]) -> list[NDArray[np.float32]]:
        """What the head makes of each text: [dimensions], [labels] or [tokens, labels]."""
        ...
