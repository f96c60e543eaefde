"""What is a part of the stack? A program, how to know that it is ready, how to stop it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import Signals

BULK_NICE = 10
"""Of what moves and computes in bulk: it has whatever the API and the database leave of the cores,
and of two that both want a core about a tenth (110 of 1,134 by Linux's weights)."""


def _nothing() -> None:
    pass


class StackError(Exception):
    """The stack cannot do what was asked. The message is one for the console."""


class PartState(StrEnum):
    """Where a part is in its life, as `halfrate status` shows it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StopStep:
    """One signal, and the seconds that the process then has to end."""

    signal: Signals
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of the stack, ready to be started.

    `ready` is given the pid and answers without raising whether the part serves; it may be asked
    many times a second.
    `stop` is taken step by step; SIGKILL to the whole process group follows the last one.
    """

    name: str
    argv: tuple[str, ...]
    folder: Path  # working directory
    environment: Mapping[str, str]
    ports: tuple[int, ...]  # the first one is the part's own
    url: str | None  # as shown, so without secrets
    ready: Callable[[int], bool]
    stop: tuple[StopStep, ...]
    start_s: float = 60.0
    user: int | None = None  # uid and gid to run as; None: ours
    outside: tuple[Path, ...] = ()  # files it makes outside its folder; removed once it stopped
    before_start: Callable[[], None] = _nothing  # done before each start, restarts included
    nice: int = 0  # added to ours: 0 for what somebody waits for, more for what is done in bulk

    @property
    def port(self) -> int | None:
        """The port that clients of the part use."""
        return self.ports[0] if self.ports else None
