"""How does a planned step become scores? One forward over its tokens, end to end."""

from collections.abc import Callable

from torch import Tensor

from engine.generate.attention import carry
from engine.generate.kv import KV
from engine.generate.layout import Layout, lay_out, scored
from engine.model.load import Decoder
from engine.plan.schedule import Step
from engine.plan.sequence import Sequence


class PackedForward:
    """A decoder that attends over a KV memory of ours, by the attention that reads `layout`."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KV,
        layout: Callable[[Step], Layout] = lay_out,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._lay_out = layout
        self._carrier = carry(decoder.model)
        self._carrier.kv = kv

    def prepare(self, step: Step, *, wipe: bool) -> None:
        """Move what the step moves; with `wipe`, empty slots before they get new holders."""
        for move in step.moves:
            if wipe:
                self._kv.wipe(move.target)
            self._kv.move(move)
        if wipe:
            for slot in step.taken:
                self._kv.wipe(slot)

    def __call__(self, step: Step) -> tuple[list[Sequence], Tensor]:
        """Compute all of a step: whose scores are wanted, and those, float32 [wanted, vocab]."""
        layout = self._carrier.layout = self._lay_out(step)
        scores = self._decoder.packed_logits(layout.ids, layout.positions, layout.sampled)
        sequences = scored(layout.pieces)
        return sequences, scores[: len(sequences)].float()
