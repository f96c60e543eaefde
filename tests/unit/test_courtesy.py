"""Do uploads let short requests pass? Between two pieces of a body, for a bounded time."""

import asyncio
from collections.abc import Callable
from typing import Any

from service.api.courtesy import Courtesy
from service.api.envelope import Envelope
from service.clock import monotonic

EVER = 3600.0
SHORT = {"type": "http", "method": "GET", "path": "/short", "headers": [], "query_string": b""}
FILE = {"type": "http", "method": "POST", "path": "/file", "headers": [], "query_string": b""}


class Served:
    """An app behind an envelope: short requests are answered once `answer` is set, files are read
    to their end. `pieces` of files have been asked for so far."""

    def __init__(self, courtesy: Courtesy) -> None:
        self._envelope = Envelope(self._app, clock=monotonic, courtesy=courtesy)
        self.answer = asyncio.Event()
        self.pieces = 0

    async def short(self) -> None:
        """Ask for something short."""
        await self._envelope(dict(SHORT), self._nothing, self._sink)

    async def file(self, pieces: int) -> None:
        """Send a file in so many pieces, each of which is there as soon as it is wanted."""
        left = pieces

        async def receive() -> Any:
            nonlocal left
            left -= 1
            self.pieces += 1
            return {"type": "http.request", "body": b"a", "more_body": left > 0}

        await self._envelope(dict(FILE), receive, self._sink)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/short":
            await self.answer.wait()
        else:
            while (await receive())["more_body"]:
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    @staticmethod
    async def _nothing() -> Any:
        raise AssertionError("a short request has no body to be read")

    @staticmethod
    async def _sink(message: Any) -> None:
        pass


async def _settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def _run(test: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_a_file_s_next_piece_is_not_read_while_somebody_waits_for_a_short_answer() -> None:
    async def test() -> None:
        served = Served(Courtesy(short_s=EVER, patience_s=EVER))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.short())
            await _settle()
            tasks.create_task(served.file(pieces=3))
            await _settle()
            assert served.pieces == 1  # by which it shows that it is a file
            served.answer.set()
        assert served.pieces == 3

    _run(test)


def test_a_file_is_not_held_up_for_longer_than_its_patience() -> None:
    async def test() -> None:
        served = Served(Courtesy(short_s=EVER, patience_s=0.001))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.short())
            await _settle()
            await served.file(pieces=3)
            served.answer.set()
        assert served.pieces == 3

    _run(test)


def test_nothing_is_held_up_by_a_request_that_is_not_short() -> None:
    async def test() -> None:
        served = Served(Courtesy(short_s=0.001, patience_s=EVER))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.short())
            await _settle()
            await served.file(pieces=3)
            served.answer.set()
        assert served.pieces == 3

    _run(test)


def test_files_do_not_stand_aside_for_one_another() -> None:
    async def test() -> None:
        served = Served(Courtesy(short_s=EVER, patience_s=EVER))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(served.file(pieces=3))
        assert served.pieces == 15

    _run(test)


def test_after_short_requests_nobody_is_waited_for() -> None:
    async def test() -> None:
        courtesy = Courtesy(short_s=EVER, patience_s=EVER)
        served = Served(courtesy)
        served.answer.set()
        for _ in range(3):
            await served.short()
        await courtesy.stand_aside()

    _run(test)
