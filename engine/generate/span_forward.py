"""How does a planned step become scores on a CUDA device? One forward, one transfer, no padding.

What engine.generate.forward is to a CPU, over the same schedule and the same slots. Steps that only
make next tokens may be replayed from graphs (engine.generate.decode_graphs).
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from engine.generate.decode_graphs import DecodeGraphs
from engine.generate.kv import KV
from engine.generate.layout import scored
from engine.generate.readers import Planned, Readers
from engine.generate.rule import rule_of
from engine.model.load import Decoder
from engine.plan.schedule import Step
from engine.plan.sequence import Sequence
from engine.transfer import upload

SPANS = "halfrate_spans"  # our name among transformers' attention functions


@dataclass(slots=True)
class _Carrier:
    """What attention layers find while a step runs. `calls` counts those that have."""

    kernels: ModuleType  # engine.generate.triton_spans
    kv: KV
    readers: Readers | None = None
    calls: int = 0


class SpanForward:
    """A decoder that attends over a KV memory of ours by our own kernels."""

    def __init__(self, decoder: Decoder, kv: KV) -> None:
        # Triton is there wherever torch was built for CUDA, and need not be elsewhere.
        from engine.generate import triton_spans  # noqa: PLC0415

        self._decoder = decoder
        self._device = decoder.device
        self._kv = kv
        self._graphs: DecodeGraphs | None = None
        self._carrier = _Carrier(triton_spans, kv)
        for module in decoder.model.modules():
            module.halfrate_carrier = self._carrier

    def capture(self, most_rows: int) -> None:
        """Capture steps that make up to so many next tokens; replays start with the next call."""
        self._graphs = DecodeGraphs(self.run, self._device, most_rows)

    def prepare(self, step: Step, *, wipe: bool) -> None:
        """Move what the step moves. Nothing is wiped: the kernels read what is written, no more."""
        del wipe
        for move in step.moves:
            self._kv.move(move)

    def __call__(self, step: Step) -> tuple[list[Sequence], Tensor]:
        """Compute all of a step: whose scores are wanted, and those, float32 [wanted, vocab]."""
        planned = Planned(step)
        scores = None if self._graphs is None else self._graphs.replay(planned)
        if scores is None:
            room = planned.room
            numbers = upload(torch.from_numpy(planned.numbers(room)), self._device)
            scores = self.run(
                Readers.of(numbers, room, single=planned.single, longest=planned.longest)
            )
        return scored(planned.pieces), scores.float()

    def run(self, readers: Readers) -> Tensor:
        """Scores [sampled, vocab] in the model's dtype."""
        self._carrier.readers, self._carrier.calls = readers, 0
        return self._decoder.packed_logits(readers.ids, readers.positions, readers.sampled)


def register_spans() -> None:
    """Make `SPANS` known to transformers; once or often."""
    AttentionInterface.register(SPANS, attend)


def attend(
    module: Any,  # noqa: ANN401 the attention layer that calls
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401 as the model hands them on
) -> tuple[Tensor, None]:
    """query: [1, heads, rows, dim]; key, value: [1, kv heads, rows, dim]. → [1, rows, heads, dim].

    Raises NotSupportedError where the model asks for what is not done here.
    """
    rule = rule_of(module, query, attention_mask, scaling, options)
    carrier = module.halfrate_carrier
    layer = carrier.kv.layers[carrier.calls]
    carrier.calls += 1
    carrier.kernels.write(layer, carrier.readers, key[0], value[0])
    read: Tensor = carrier.kernels.attend(query[0], layer, carrier.readers, rule)
    return read[None], None
