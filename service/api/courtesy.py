"""How do requests that are answered in a moment get past those that carry files?

One event loop and one interpreter's lock serve both. Between two pieces of its body an upload
stands aside while anybody waits for a short answer; its client is held back by TCP meanwhile. It
does so for a bounded time, and for nobody for long: files move under any number of short requests.
"""

import asyncio

SHORT_S = 0.25
"""Whoever has not been answered by then did not ask for something short."""

PATIENCE_S = 0.05
"""An upload stands aside for so long at most before each piece. A piece is up to 320 KiB, so one
upload alone still moves 6 MiB/s, and sixteen 100."""


class Courtesy:
    """Who waits for a short answer just now? Used on one event loop."""

    def __init__(self, *, short_s: float = SHORT_S, patience_s: float = PATIENCE_S) -> None:
        self._short_s, self._patience_s = short_s, patience_s
        self._waiting: dict[object, asyncio.TimerHandle] = {}
        self._nobody = asyncio.Event()

    def arrive(self) -> object:
        """Somebody waits from now on: a token to `leave` with."""
        token = object()
        later = asyncio.get_running_loop().call_later(self._short_s, self.leave, token)
        self._waiting[token] = later
        return token

    def leave(self, token: object) -> None:
        """Whoever arrived is answered, or is in no hurry after all; again is fine."""
        timer = self._waiting.pop(token, None)
        if timer is None:
            return
        timer.cancel()
        if not self._waiting:
            self._nobody.set()
            self._nobody = asyncio.Event()

    async def stand_aside(self) -> None:
        """Return once nobody waits, or patience is at its end."""
        if self._waiting:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._nobody.wait()
            except TimeoutError:
                return
