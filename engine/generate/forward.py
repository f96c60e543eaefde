"""How does a planned step become scores? One forward over its tokens, end to end."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.generate.attention import carry
from engine.generate.kv import KV
from engine.generate.layout import Layout, lay_out
from engine.generate.pages import PageLayout
from engine.model.load import Decoder
from engine.plan.schedule import Step
from engine.plan.sequence import Sequence


class PackedForward:
    """A decoder that attends over a KV memory of ours, by the attention that reads `layout`."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KV,
        layout: Callable[[Step], Layout | PageLayout] = lay_out,
    ) -> None:
        self._model = decoder.model
        self._accepts = decoder.accepts
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
        """Compute all of a step: whose next token is wanted, and float32 scores [those, vocab]."""
        layout = self._carrier.layout = self._lay_out(step)
        options: dict[str, Any] = {"use_cache": False}
        if "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = layout.sampled
        logits: Tensor = self._model(
            input_ids=layout.ids[None],
            position_ids=layout.positions[None],
            **options,
        ).logits[0]
        if "logits_to_keep" not in self._accepts:
            logits = logits[layout.sampled]
        sampling = [piece.strand for piece in layout.pieces if piece.samples]
        sequences = [strand for strand in sampling if isinstance(strand, Sequence)]
        return sequences, logits[: len(sequences)].float()
