"""How is a pack's forward captured once a shape, so that like packs only replay it?

For small models on CUDA, whose kernels are over before the next is launched. It has not been run on
a GPU yet.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.encode.packed import Packed
from engine.encode.texts import Text
from engine.model.attention import Pack
from engine.model.load import Encoder
from engine.model.varlen import Bounds
from engine.plan.shapes import Shape, shape_of
from engine.transfer import upload

log = logging.getLogger(__name__)

_MOST = 32  # graphs; each keeps its hidden states, and a file needs some twenty

Run = Callable[[], Tensor]


class CudaCapture:
    """Captures into one pool of memory that all graphs share."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """`run` once, then a replay of what it did, which returns the same tensor each time."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries choose their kernels here, not in the capture
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = run()

        def replay() -> Tensor:
            graph.replay()
            return made

        return replay


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    inputs: Tensor  # int64 [3, 1, tokens], which the replay reads
    offsets: Tensor  # int32 [rows + 1], likewise
    replay: Run


class Captured(Packed):
    """Packed, with the transformer's part captured; the longest packs come first, so do graphs.

    Only for models whose layers all attend by the varlen kernel: any other makes the capture fail,
    and a shape that failed runs as Packed does. `budget` is a full pack's tokens.
    """

    def __init__(
        self, encoder: Encoder, *, budget: int, capture: Callable[[Run], Run] | None = None
    ) -> None:
        super().__init__(encoder)
        self._budget = budget
        self._capture = capture or CudaCapture()
        self._graphs: dict[Shape, _Graph | None] = {}
        self._weights = self._places_of_weights()

    def hidden(self, batch: Sequence[Text], pack: Pack) -> tuple[Tensor, Tensor]:
        """As Packed says; both are overwritten by the next call."""
        lengths = [len(text.tokens) for text in batch]
        shape = shape_of(lengths, budget=self._budget)
        graph = None if shape is None else self._graph(shape)
        if shape is None or graph is None:
            return super().hidden(batch, pack)
        device = self._encoder.device
        graph.inputs.copy_(upload(self.inputs(batch, shape.tokens), device))
        lengths += [0] * (shape.rows - len(lengths))
        graph.offsets.copy_(Bounds.of(lengths, device).offsets)
        return graph.inputs[0], graph.replay()

    def _graph(self, shape: Shape) -> _Graph | None:
        weights = self._places_of_weights()
        if weights != self._weights:  # they were widened and came back elsewhere
            self._graphs, self._weights = {}, weights
        if shape not in self._graphs:
            full = len(self._graphs) >= _MOST
            self._graphs[shape] = None if full else self._captured(shape)
        return self._graphs[shape]

    def _captured(self, shape: Shape) -> _Graph | None:
        """A graph of this shape, or None where it cannot be captured."""
        device = self._encoder.device
        inputs = torch.zeros(3, 1, shape.tokens, dtype=torch.int64, device=device)
        offsets = torch.zeros(shape.rows + 1, dtype=torch.int32, device=device)
        # Without runs, so that a layer which the kernel does not suit raises IndexError.
        pack = Pack(runs=(), bounds=Bounds(offsets, shape.longest), callers=[])
        try:
            return _Graph(inputs, offsets, self._capture(lambda: self.run(inputs, pack)))
        except (RuntimeError, IndexError) as error:
            log.warning(
                "no graph could be captured; such packs run without",
                extra={"shape": str(shape), "reason": f"{type(error).__name__}: {error}"},
            )
            return None

    def _places_of_weights(self) -> tuple[int, ...]:
        return tuple(weight.data_ptr() for weight in self._encoder.whole.parameters())
