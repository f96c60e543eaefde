"""Does a POST go only where it was checked that it may, whatever the other side does?"""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import pytest

from service.outbound import NotAnswered, Sender, Why
from tests.receiver import Receiver, receiver

CONTEXT = httpx.create_ssl_context()
PUBLIC = "93.184.216.34"


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as running:
        yield running


def names(*answers: Sequence[str]) -> Any:
    """A resolver whose answers are these, one after another; the last one stays."""
    left = list(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


def post(url: str, *, private: bool = False, **more: Any) -> int:
    sender = Sender(private_addresses=private, context=CONTEXT, **more)
    return asyncio.run(sender.post(url, body=b"{}", headers={"webhook-id": "1"}))


def why(url: str, **more: Any) -> Why:
    with pytest.raises(NotAnswered) as raised:
        post(url, **more)
    return raised.value.why


def test_the_body_and_the_headers_arrive(server: Receiver) -> None:
    assert post(f"{server.url}/hook?a=b", private=True) == 200
    (received,) = server.received
    assert (received.path, received.body) == ("/hook?a=b", b"{}")
    assert received.headers["webhook-id"] == "1"


def test_the_name_asked_for_stands_in_the_request_and_the_checked_address_is_called(
    server: Receiver,
) -> None:
    port = server.url.rsplit(":", 1)[1]
    resolve = names(["127.0.0.1"])
    assert post(f"http://hooks.example:{port}/", private=True, resolve=resolve) == 200
    assert server.received[0].headers["host"] == f"hooks.example:{port}"


def test_tls_is_spoken_under_the_name_asked_for() -> None:
    with hello() as (port, heard):
        url = f"https://hooks.example:{port}/"
        assert why(url, private=True, resolve=names(["127.0.0.1"])) is Why.CONNECTION
        assert b"hooks.example" in heard()


@contextmanager
def hello() -> Iterator[Any]:
    """A server that takes the first bytes of one connection, and closes it."""
    taken: list[bytes] = []

    def take() -> None:
        connection, _ = listener.accept()
        with closing(connection):
            taken.append(connection.recv(4_096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()

        def heard() -> bytes:
            thread.join(20)
            return taken[0]

        yield listener.getsockname()[1], heard


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["fd00:ec2::254"],
        ["fe80::1%eth0"],
        [PUBLIC, "127.0.0.1"],
        ["127.0.0.1", PUBLIC],
    ],
)
def test_a_name_that_leads_to_a_private_address_is_not_called(
    server: Receiver, addresses: list[str]
) -> None:
    port = server.url.rsplit(":", 1)[1]
    assert why(f"http://hooks.example:{port}/", resolve=names(addresses)) is Why.FORBIDDEN
    assert server.received == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "017700000001", "[::ffff:127.0.0.1]"]
)
def test_no_spelling_of_a_private_address_is_called(server: Receiver, host: str) -> None:
    port = server.url.rsplit(":", 1)[1]
    assert why(f"http://{host}:{port}/") is Why.FORBIDDEN
    assert server.received == []


def test_a_name_that_changes_its_mind_is_looked_up_once(server: Receiver) -> None:
    """A second look would find this machine; the checked address is the one that is tried."""
    port = server.url.rsplit(":", 1)[1]
    resolve = names([PUBLIC], ["127.0.0.1"])
    url = f"http://hooks.example:{port}/"
    assert why(url, resolve=resolve, deadline_s=0.2) in {Why.TIMED_OUT, Why.CONNECTION}
    assert server.received == []


def test_a_redirect_is_not_followed(server: Receiver) -> None:
    server.answers += [302, 307]
    assert post(f"{server.url}/", private=True) == 302
    assert post(f"{server.url}/", private=True) == 307
    assert server.at("/elsewhere") == []


def test_the_next_address_is_tried_where_one_refuses(server: Receiver) -> None:
    port = server.url.rsplit(":", 1)[1]
    resolve = names(["127.0.0.2", "127.0.0.1"])  # the server listens on the second one alone
    assert post(f"http://hooks.example:{port}/", private=True, resolve=resolve) == 200


def test_a_proxy_of_the_environment_is_not_asked(
    server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert post(f"{server.url}/", private=True) == 200


def test_a_name_that_is_not_there_is_said_to_be() -> None:
    async def nothing(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    assert why("http://hooks.example/", resolve=nothing) is Why.UNKNOWN_NAME
    assert why("http://hooks.example/", resolve=names([])) is Why.UNKNOWN_NAME


def test_a_port_where_nobody_listens_is_no_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert why(f"http://127.0.0.1:{taken.getsockname()[1]}/", private=True) is Why.CONNECTION


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"a"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    ],
    ids=["silence", "endless header", "endless 1xx"],
)
def test_a_server_that_never_comes_to_an_end_is_left_at_the_deadline(
    first: bytes, again: bytes
) -> None:
    with dripping(first, again) as url:
        assert why(url, private=True, deadline_s=0.3) is Why.TIMED_OUT


@pytest.mark.parametrize("block", [b"a", b"a" * 65_536], ids=["slow", "large"])
def test_an_endless_body_does_not_matter_once_the_status_is_there(block: bytes) -> None:
    with dripping(b"HTTP/1.1 204 OK\r\n\r\n", block) as url:
        assert post(url, private=True) == 204
    with dripping(b"HTTP/1.1 200 OK\r\n\r\n", block) as url:
        assert post(url, private=True) == 200


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"\0\1\2", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http_is_no_answer(answer: bytes) -> None:
    with dripping(answer) as url:
        assert why(url, private=True, deadline_s=0.5) in {Why.CONNECTION, Why.TIMED_OUT}


@contextmanager
def dripping(first: bytes, again: bytes = b"") -> Iterator[str]:
    """A server that answers one request by `first`, and then by `again` for ever."""
    stop = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with closing(connection), suppress(OSError):
            connection.recv(65_536)
            connection.sendall(first)
            while not stop.wait(0.05):
                connection.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        stop.set()
        thread.join(20)
