"""An engine worker whose engine hangs on a text that begins with "hang": drains once, and ends.

python -m tests.hanging_worker; settings come from HALFRATE_*.
"""

import ctypes
import threading
from collections import Counter

from engine.request import Result
from tests.stand_ins import Watched, text_of
from worker import engine_process
from worker.resources import of_engine_process


class Hanging(Watched):
    """Never ends the step that meets such a text; "hang hard" keeps the interpreter, too."""

    def step(self) -> list[Result]:
        for request in self._waiting:
            text = text_of(request)
            if text.startswith("hang hard"):
                ctypes.PyDLL(None).pause()
            elif text.startswith("hang"):
                threading.Event().wait()
        return super().step()


def main() -> None:
    """Run what is runnable."""
    engine_process.engine_of = lambda *_: Hanging(Counter(), results_per_step=8)  # type: ignore[assignment]
    with engine_process.serving(of_engine_process()) as process:
        process.drain("stub-embed")


if __name__ == "__main__":
    main()
