"""How is work on a CUDA device captured, so that it can be replayed without the host's part?"""

from collections.abc import Callable

import torch
from torch import Tensor

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
