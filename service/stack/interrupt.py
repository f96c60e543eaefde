"""Has a signal asked the supervisor to stop, or, a second time, to hurry?"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Counts the signals that ask for an end."""

    def __init__(self) -> None:
        self._asked = 0

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator["Interrupt"]:
        """One that listens to Ctrl-C, SIGTERM and a closed terminal, in the main thread."""
        interrupt = cls()
        before = {number: signal.signal(number, interrupt.count) for number in SIGNALS}
        try:
            yield interrupt
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def count(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """Take note of one signal."""
        self._asked += 1

    def stop_asked(self) -> bool:
        """Whether to stop."""
        return self._asked > 0

    def hurry_asked(self) -> bool:
        """Whether to stop without grace."""
        return self._asked > 1
