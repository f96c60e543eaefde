"""How are steps that only make next tokens captured once a size, so that others only replay them?

Such a step's kernels are over before the host has launched the next. Sizes come in buckets; a step
takes the smallest that holds it, the rest are rows of nobody. It has not been run on a GPU yet.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.capture import CudaCapture, Run
from engine.generate.readers import Planned, Readers, Room, nobody
from engine.memory import is_out_of_memory
from engine.transfer import upload

log = logging.getLogger(__name__)

_SMALL = (1, 2, 4, 8)
_APART = 16  # larger buckets are so many rows apart
_SPANS = 8  # of each row, on the average; a step with more runs without a graph


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    room: Room
    numbers: Tensor  # int64, which the replay reads
    replay: Run


class DecodeGraphs:
    """The graphs of up to `most_rows` rows, the largest captured first, all in one pool of memory.

    `run` makes scores of what readers say. What cannot be captured runs without.
    """

    def __init__(
        self,
        run: Callable[[Readers], Tensor],
        device: torch.device,
        most_rows: int,
        capture: Callable[[Run], Run] | None = None,
    ) -> None:
        self._run = run
        self._capture = capture or CudaCapture()
        self._scores: Tensor | None = None  # [most rows, vocab], of whichever graph ran last
        self._graphs: dict[int, _Graph] = {}
        for rows in reversed(buckets(most_rows)):
            try:
                self._graphs[rows] = self._captured(rows, device)
            except RuntimeError as error:
                log.warning(
                    "no graph could be captured; such steps run without",
                    extra={"rows": rows, "reason": f"{type(error).__name__}: {error}"},
                )
                if not is_out_of_memory(error):
                    break
        self._sizes = sorted(self._graphs)

    def replay(self, planned: Planned) -> Tensor | None:
        """Scores [sampled, vocab], overwritten by the next call; None where no graph does it."""
        if planned.longest > 1:
            return None
        need = planned.room
        rows = next((size for size in self._sizes if self._graphs[size].room.holds(need)), None)
        if rows is None:
            return None
        graph = self._graphs[rows]
        numbers = torch.from_numpy(planned.numbers(graph.room))
        graph.numbers.copy_(upload(numbers, graph.numbers.device))
        return graph.replay()[: need.sampled]

    def _captured(self, rows: int, device: torch.device) -> _Graph:
        room = Room(rows=rows, sampled=rows, readers=rows, spans=rows * _SPANS)
        numbers = torch.from_numpy(nobody(room)).to(device)
        readers = Readers.of(numbers, room, single=rows, longest=1)

        def run() -> Tensor:
            scores = self._run(readers)
            if self._scores is None:  # in the largest one's first run, which is not captured
                self._scores = torch.empty_like(scores)
            return self._scores[:rows].copy_(scores)

        return _Graph(room, numbers, self._capture(run))


def buckets(most: int) -> list[int]:
    """Sizes from one row to `most`."""
    sizes = [*_SMALL, *range(_APART, most, _APART), most]
    return sorted({size for size in sizes if size <= most})
