"""What do the clients of the polling bench do, and when were they answered?

Each kind runs in a process of its own, in a session of its own, and does as little as it can beside
its requests: what it costs is taken from the server's cores. How long an answer took is reckoned
from the moment at which its client set out to ask, up to the moment at which the kernel took the
answer's last piece in: how long the client then waited for a core is not the server's doing, and
neither is how late it set out, which is told apart.
"""

import asyncio
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

SO_TIMESTAMPING = 37  # of Linux; Python's socket module does not name it
RECEIVED_AND_TOLD = 1 << 3 | 1 << 4  # SOF_TIMESTAMPING_RX_SOFTWARE, SOF_TIMESTAMPING_SOFTWARE
BOUNDARY = "0123456789abcdef"

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What one client asks for, and with which key."""

    url: str
    key: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @property
    def path(self) -> str:
        """As the request line has it."""
        return urlsplit(self.url).path


@dataclass(frozen=True)
class Answer:
    """Seconds: from when a poll was due until it was sent, and from then until it was answered."""

    late: float
    took: float


def apart() -> None:
    """First in each of these processes. Where the kernel shares cores out among sessions, the
    clients are nobody's kin: neither one another's nor the server's."""
    os.setsid()


def clock() -> float:
    """Seconds, by the clock with which the kernel stamps what it receives."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def poll_openly(
    targets: list[Target], clients: int, every: float, begins: float, ends: float
) -> list[Answer]:
    """Each client asks at its own moment of each interval, whatever the last answer took, by a
    connection of its own: the SDK closes one that has rested for 5 s."""
    answers: list[Answer] = []

    async def client(number: int) -> None:
        due = begins + every * number / clients
        while due < ends:
            await asyncio.sleep(max(0, due - clock()))
            sent, answered = await _ask(targets[number % len(targets)])
            answers.append(Answer(sent - due, answered - sent))
            due += every

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))

    asyncio.run(all_of_them())
    return answers


async def _ask(target: Target) -> tuple[float, float]:
    """When the request was sent, and when its answer's last piece had come."""
    loop, (host, port) = asyncio.get_running_loop(), target.address
    request = (
        f"GET {target.path} HTTP/1.1\r\nhost: {host}:{port}\r\naccept: */*\r\n"
        f"authorization: Bearer {target.key}\r\nconnection: close\r\n\r\n"
    ).encode()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RECEIVED_AND_TOLD)
        sent = clock()
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, request)
        answer, answered = bytearray(), 0.0
        while True:
            await _readable(connection)
            piece, told, _, _ = connection.recvmsg(65_536, 128)
            if not piece:
                break
            answer += piece
            answered = _stamp(told) or clock()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{target.path}: {bytes(answer[:200])!r}")
    return sent, answered


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection, ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


def _stamp(told: list[tuple[int, int, bytes]]) -> float | None:
    """When the kernel received it; None where it does not say."""
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPING):
            seconds, nanoseconds = struct.unpack_from("qq", data)
            return float(seconds + nanoseconds / 1e9)
    return None


def poll_closely(target: Target, clients: int, ends: float) -> list[float]:
    """Seconds of every answer to clients that ask again at once, each by a connection it keeps."""
    headers = {"authorization": f"Bearer {target.key}"}

    def client() -> list[float]:
        took, connection = [], http.client.HTTPConnection(*target.address, timeout=60)
        while clock() < ends:
            begun = clock()
            connection.request("GET", target.path, headers=headers)
            _json(connection)
            took.append(clock() - begun)
        connection.close()
        return took

    return [each for took in _in_threads(client, clients) for each in took]


def upload(target: Target, clients: int, size: int, ends: float) -> int:
    """Bytes that so many clients got up until then: one file of `size` after the other, each
    removed once it is there."""
    body = _form(size)
    headers = {"authorization": f"Bearer {target.key}"}
    posted = {**headers, "content-type": f"multipart/form-data; boundary={BOUNDARY}"}

    def client() -> int:
        done, connection = 0, http.client.HTTPConnection(*target.address, timeout=60)
        while clock() < ends:
            connection.request("POST", target.path, body=body, headers=posted)
            file = _json(connection)
            done += int(file["bytes"])
            connection.request("DELETE", f"{target.path}/{file['id']}", headers=headers)
            _json(connection)
        connection.close()
        return done

    return sum(_in_threads(client, clients))


def _form(size: int) -> bytes:
    purpose = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    file = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n'
        "content-type: text/plain\r\n\r\n"
    )
    content = b"x" * (size - 1) + b"\n"
    return (purpose + file).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def _json(connection: http.client.HTTPConnection) -> dict[str, object]:
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != http.HTTPStatus.OK:
        raise RuntimeError(f"{reply.status}: {text[:200]!r}")
    return dict(json.loads(text))


def _in_threads(client: Callable[[], T], clients: int) -> list[T]:
    with ThreadPoolExecutor(clients) as threads:
        return [each.result() for each in [threads.submit(client) for _ in range(clients)]]
