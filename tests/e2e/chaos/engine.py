"""Which engine can tests hold, trip and watch? A stub that obeys files.

In the home's `control` folder: while `hold` is there, texts that begin with HELD have no answer;
`oom`, `nan` and `raise` are each taken by the next step, which then fails so; `answered` gets a
line with the text of every answer, so that work done twice shows.
"""

import os
import time
from collections.abc import Hashable, Iterable
from pathlib import Path

from engine.config import EngineConfig
from engine.request import EncodeRequest, Failure, FailureReason, Request, Result
from engine.stub import StubEngine, StubTokenizer

HELD = "held"
STEP_S = 0.02
RESULTS_PER_STEP = 4

_FAILURES = {"oom": FailureReason.OUT_OF_MEMORY, "nan": FailureReason.NON_FINITE}


class MadeUp(Exception):
    """A step of the engine went wrong, as asked."""


class HinderedEngine(StubEngine):
    """A stub that takes its time, and does as the control folder says."""

    def __init__(self, config: EngineConfig, control: Path) -> None:
        super().__init__(config, results_per_step=RESULTS_PER_STEP, seconds_per_step=STEP_S)
        self._control = control
        self._tokens = StubTokenizer()
        self._texts: dict[Hashable, str] = {}
        self._held: dict[Hashable, Request] = {}

    @property
    def pending(self) -> int:
        return super().pending + len(self._held)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert isinstance(request, EncodeRequest)
            text = self._tokens.decode(request.tokens)
            self._texts[request.id] = text
            if text.startswith(HELD):
                self._held[request.id] = request
            else:
                super().submit([request])

    def abort(self, ids: Iterable[Hashable]) -> None:
        gone = list(ids)
        for each in gone:
            self._held.pop(each, None)
        super().abort(gone)

    def step(self) -> list[Result]:
        if self._held and not (self._control / "hold").exists():
            super().submit(self._held.values())
            self._held.clear()
        if not super().pending:
            time.sleep(STEP_S)
            return []
        results = super().step()
        if self._taken("raise"):
            raise MadeUp
        for word, reason in _FAILURES.items():
            if self._taken(word):
                return [Failure(result.id, reason, "made up") for result in results]
        self._note(results)
        return results

    def _taken(self, word: str) -> bool:
        try:
            (self._control / word).unlink()
        except FileNotFoundError:
            return False
        return True

    def _note(self, results: Iterable[Result]) -> None:
        lines = "".join(f"{self._texts.pop(result.id)}\n" for result in results)
        descriptor = os.open(self._control / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
