"""Which engines do tests put where the real one runs? The stub, counted, gated or failing."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.config import EngineConfig, Kind
from engine.request import Embedding, EncodeRequest, Failure, FailureReason, Request, Result
from engine.stub import BEGIN, StubEngine


def text_of(request: Request) -> str:
    """What the stub's tokenizer made the request of."""
    tokens = request.tokens if isinstance(request, EncodeRequest) else request.prompt
    return bytes(token for token in tokens if token < BEGIN).decode()


class Watched(StubEngine):
    """Counts the texts it was asked for in `seen`, which outlives it."""

    def __init__(self, seen: Counter[str], kind: Kind = Kind.EMBED, **rhythm: int) -> None:
        super().__init__(EngineConfig(model=Path(), kind=kind), **rhythm)
        self.seen = seen
        self.texts: dict[object, str] = {}

    def submit(self, requests: Iterable[Request]) -> None:
        arrived = list(requests)
        for request in arrived:
            self.texts[request.id] = text_of(request)
            self.seen[text_of(request)] += 1
        super().submit(arrived)


class Gated(Watched):
    """Answers while `gate` is open; waits, holding what it was given, while it is closed."""

    def __init__(self, seen: Counter[str], gate: threading.Event, **rhythm: int) -> None:
        super().__init__(seen, **rhythm)
        self._gate = gate

    def step(self) -> list[Result]:
        if not self._gate.wait(0.01):
            return []
        return super().step()


class Stuck(Watched):
    """Answers every text but those that begin with "stuck"."""

    def step(self) -> list[Result]:
        first = next(iter(self._waiting), None)
        if first is not None and text_of(first).startswith("stuck"):
            self._waiting.rotate(-1)
            threading.Event().wait(0.005)
            return []
        return super().step()


class Failing(Watched):
    """A text `<reason> …` gets a Failure of that reason, others their answer."""

    def step(self) -> list[Result]:
        return [self._failed(result) for result in super().step()]

    def _failed(self, result: Result) -> Result:
        word = self.texts[result.id].split(" ")[0]
        if word not in set(FailureReason):
            return result
        return Failure(result.id, FailureReason(word), f"made up: {word}", "input")


class Breaking(Watched):
    """Raises in the step that meets a text beginning with "break"."""

    def step(self) -> list[Result]:
        if any(text_of(request).startswith("break") for request in self._waiting):
            raise RuntimeError("the device is gone")
        return super().step()


class Misshapen(Watched):
    """Answers a text beginning with "bug" with a vector that no answer can be made of."""

    def step(self) -> list[Result]:
        return [self._odd(result) for result in super().step()]

    def _odd(self, result: Result) -> Result:
        if isinstance(result, Embedding) and self.texts[result.id].startswith("bug"):
            return Embedding(result.id, object(), result.input_tokens)  # type: ignore[arg-type]
        return result


Make = Callable[[], StubEngine]
