"""What stands between the parts, so that their connections can be cut and held? A TCP relay."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK = 64 * 1024


class Relay:
    """Ports that pass bytes on to others, all served by one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._links: set[asyncio.StreamWriter] = set()
        self._cuts = 0
        self._hold: bytes | None = None
        self._released = asyncio.Event()
        self.held = 0

    def to(self, port: int) -> int:
        """A port that leads to that one; both on loopback."""

        async def listen() -> int:
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(reader, writer, port), "127.0.0.1", 0
            )
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return self._run(listen())

    def cut(self, replies: int) -> None:
        """End every connection there is, and the next replies in their midst, this many."""

        async def end() -> None:
            self._cuts = replies
            for writer in list(self._links):
                writer.transport.abort()

        self._run(end())

    def hold(self, beginning: bytes) -> None:
        """Requests that hold these bytes wait until `release`."""

        async def begin() -> None:
            self._hold, self.held = beginning, 0
            self._released.clear()

        self._run(begin())

    def release(self) -> None:
        """Let pass what waits."""

        async def end() -> None:
            self._hold = None
            self._released.set()

        self._run(end())

    def close(self) -> None:
        """End it all."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            for writer in list(self._links):
                writer.transport.abort()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self._links.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            self._links.add(back)
            try:
                await asyncio.gather(self._requests(reader, back), self._replies(there, writer))
            finally:
                self._links.discard(back)
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(writer)
            writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            if self._hold is not None and self._hold in chunk:
                self.held += 1
                await self._released.wait()
            writer.write(chunk)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            if self._cuts > 0:
                self._cuts -= 1
                writer.write(chunk[: len(chunk) // 2])
                await writer.drain()
                raise ConnectionResetError
            writer.write(chunk)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()
