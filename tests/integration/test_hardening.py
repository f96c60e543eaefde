"""Does the API hold against what no honest client sends: bombs, floods, tricks and silence?"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from service.api.body import MAX_KEYS
from service.api.envelope import HEADERS, Envelope
from service.api.listen import LONGEST_HEADERS
from service.clock import monotonic
from service.errors import TooSlow
from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import STUBS, Api, Server, api_server, eventually, serving

GIB = 1024**3


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


# Headers of every reply


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/v1/models", True, 200),
        ("GET", "/v1/models", False, 401),
        ("GET", "/v1/files/file-1", True, 404),
        ("PUT", "/v1/files", True, 405),
        ("POST", "/v1/batches", True, 400),
        ("POST", "/v1/embeddings", True, 404),
        ("GET", "/health/live", False, 200),
        ("GET", "/openapi.json", False, 200),
        ("GET", "/", False, 404),
    ],
)
def test_every_reply_has_the_security_headers(
    api: Api, method: str, path: str, key: bool, status: int
) -> None:
    headers = {"authorization": f"Bearer {api.key}"} if key else {}
    reply = httpx.request(method, f"{api.url}{path}", headers=headers)
    assert reply.status_code == status
    assert {name: reply.headers.get(name) for name in HEADERS} == HEADERS
    assert "server" not in reply.headers


def test_a_file_s_bytes_are_stored_and_shown_by_nobody(api: Api) -> None:
    file = api.upload(b"<script>alert(1)</script>\n", "page.html.jsonl")
    with api.http() as http:
        reply = http.get(f"/v1/files/{file.id}/content")
    assert {name: reply.headers.get(name) for name in HEADERS} == HEADERS
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["content-disposition"].startswith("attachment;")


# Bodies


def test_no_route_reads_a_huge_body_before_it_answers(api: Api) -> None:
    document = httpx.get(f"{api.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            kind = next(iter(operation.get("requestBody", {}).get("content", {})), "text/plain")
            head = (
                f"{method.upper()} {path.replace('{', '').replace('}', '')} HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {api.key}\r\nContent-Type: {kind}; boundary=x\r\n"
                f"Content-Length: {100 * GIB}\r\n\r\n"
            )
            with closing(_connect(api.url)) as raw:
                raw.sendall(head.encode())
                status = int(raw.recv(65536).split(b" ")[1])
            expected = (413, 404) if "requestBody" in operation else (200, 404)
            assert status in expected, (method, path)


BOMBS = {
    "arrays in arrays": b"[" * 500_000,
    "objects in objects": b'{"a":' * 100_000,
    "depth, closed": b'{"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a long integer": b'{"endpoint":' + b"9" * 500_000 + b"}",
    "a long negative integer": b'{"endpoint":-' + b"9" * 500_000 + b"}",
    "a long fraction": b'{"endpoint":0.' + b"9" * 500_000 + b"}",
    "a huge exponent": b'{"endpoint":1e999999999}',
    "many keys": b"{" + b",".join(b'"k%d":1' % n for n in range(60_000)) + b"}",
    "many keys of metadata": json.dumps(
        {"metadata": dict.fromkeys(map(str, range(MAX_KEYS + 1)), "x")}
    ).encode(),
    "many items": b'{"metadata":[' + b"1," * 300_000 + b"1]}",
    "a long key": b'{"' + b"k" * 900_000 + b'":1}',
    "a long string": b'{"endpoint":"' + b"x" * 900_000 + b'"}',
    "a long string of escapes": b'{"endpoint":"' + b"\\u0000" * 150_000 + b'"}',
    "a long window": b'{"completion_window":"' + b"1" * 900_000 + b'h"}',
    "one key many times": b"{" + b'"endpoint":"x",' * 60_000 + b'"endpoint":"x"}',
    "white space": b" " * 900_000,
    "lone surrogates": b'{"endpoint":"' + b"\\ud800" * 100_000 + b'"}',
    "UTF-16": '{"endpoint":"x"}'.encode("utf-16"),
    "no UTF-8": b'{"endpoint":"\xff\xfe"}',
    "text behind the end": b'{"endpoint":"x"}{"endpoint":"x"}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_of_json_is_400_and_its_answer_is_short(api: Api, bomb: bytes) -> None:
    with api.http() as http:
        reply = http.post("/v1/batches", content=bomb)
    _in_shape(reply, 400)
    assert len(reply.content) < 2_000


# Names, paths and queries


@pytest.mark.parametrize(
    "name",
    [
        'a"; filename="b.jsonl',
        "../../etc/passwd.jsonl",
        "..\\..\\windows.jsonl",
        "%0d%0aSet-Cookie: a=b.jsonl",
        "été 漢字 🙂.jsonl",
        "a\u2028b.jsonl",
        "a;b,c=d'e.jsonl",
        ".jsonl",
        "x" * 249 + ".jsonl",
    ],
)
def test_a_filename_stays_a_name(api: Api, name: str) -> None:
    file = api.upload(b"{}\n", name)
    name = name.replace('"', "%22")  # the client's own doing, as browsers do it
    assert file.filename == name
    with api.http() as http:
        reply = http.get(f"/v1/files/{file.id}/content")
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    value = reply.headers["content-disposition"]
    assert value.isascii()
    assert value.isprintable()
    # One plain name in quotes, then the encoded one.
    plain, encoded = value.removeprefix('attachment; filename="').split("\"; filename*=UTF-8''")
    assert '"' not in plain
    assert httpx.URL(f"http://x/?n={encoded}").params["n"] == name
    # Where its bytes lie has nothing of the name in it.
    assert all(key.endswith(file.id.removeprefix("file-")) for key in api.objects())


@pytest.mark.parametrize(
    "name", ["a\r\nx-evil: 1.jsonl", "a\x00.jsonl", "a\x1b[31m.jsonl", "a\x7f"]
)
def test_a_filename_with_control_characters_is_refused(api: Api, name: str) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="'
        + name.encode()
        + b'"\r\n\r\n{}\r\n--b--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with api.http() as http:
        reply = http.post("/v1/files", content=body, headers=headers)
    _in_shape(reply, 400)
    assert "x-evil" not in reply.headers
    assert api.objects() == []


ODD = ["%00", "%0d%0aset-cookie:%20a=b", "%2e%2e%2f%2e%2e", "x" * 6_000, "%ff%fe", "%F0%9F%99%82"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/models"])
def test_an_odd_id_is_404(api: Api, path: str, odd: str) -> None:
    with api.http() as http:
        for url in (f"{path}/{odd}", f"{path}/file-{odd}", f"{path}/batch_{odd}/content"):
            reply = http.get(url)
            _in_shape(reply, 404)
            assert "set-cookie" not in reply.headers
            assert len(reply.content) < 1_000


@pytest.mark.parametrize("odd", [*ODD, "", "1e3", "٣", "-1", "99999999999999999999", "NaN"])
@pytest.mark.parametrize("name", ["after", "limit", "order", "purpose"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_an_odd_query_is_an_answer_and_no_crash(api: Api, path: str, name: str, odd: str) -> None:
    with api.http() as http:
        reply = http.get(f"{path}?{name}={odd}")
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            _in_shape(reply, 400)
        assert len(reply.content) < 1_000


@pytest.mark.parametrize(
    "value", [b"Bearer \xff\xfe", b"Bearer " + b"x" * 20_000, b"Bearer a b", b"Bearer \xc3\xa9"]
)
def test_an_odd_key_is_401(api: Api, value: bytes) -> None:
    reply = httpx.get(f"{api.url}/v1/models", headers=[(b"authorization", value)])
    _in_shape(reply, 401)
    assert len(reply.content) < 1_000


@pytest.mark.parametrize(
    "value", ["bytes=0-" + "9" * 5_000, "bytes=" + "0-0," * 3_000 + "0-0", "bytes=--1", "x" * 9_000]
)
def test_an_odd_range_is_an_answer_and_no_crash(api: Api, value: str) -> None:
    file = api.upload(b"0123456789\n")
    with api.http() as http:
        reply = http.get(f"/v1/files/{file.id}/content", headers={"range": value})
    assert reply.status_code == 200
    assert reply.content == b"0123456789\n"


def test_headers_without_end_are_not_gathered(api: Api) -> None:
    with closing(_connect(api.url)) as raw:
        raw.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Long: ")
        raw.sendall(b"x" * (2 * LONGEST_HEADERS))
        assert raw.recv(65536).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{api.url}/health/live").status_code == 200


# Floods and silence


class Waiting:
    """An app whose requests last until `done` is set, and which counts them."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        from anyio import to_thread

        self.under_way += 1
        if not scope["path"].startswith("/health/"):
            await to_thread.run_sync(self.done.wait, 30)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def test_too_many_requests_at_once_are_503_and_health_still_answers() -> None:
    app = Waiting()
    with serving(Envelope(app, clock=monotonic, max_requests=2)) as url:
        with closing(_connect(url)) as one, closing(_connect(url)) as other:
            for raw in (one, other):
                raw.sendall(b"GET /work HTTP/1.1\r\nHost: x\r\n\r\n")
            eventually(lambda: app.under_way == 2)
            refused = httpx.get(f"{url}/work")
            _in_shape(refused, 503)
            assert 0 < int(refused.headers["retry-after"]) <= 120
            assert httpx.get(f"{url}/health/live").status_code == 204
            app.done.set()
            for raw in (one, other):
                assert raw.recv(65536).startswith(b"HTTP/1.1 204")
        assert httpx.get(f"{url}/work").status_code == 204


def test_a_body_that_stops_coming_is_given_up(server: Server) -> None:
    api = server.project()
    with _impatient(server) as url, closing(_connect(url)) as raw:
        raw.sendall(
            b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            + f"Authorization: Bearer {api.key}\r\n\r\n{{".encode()
        )
        reply = _until_closed(raw)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == TooSlow.code


def test_an_upload_that_stops_coming_is_given_up_and_leaves_nothing(server: Server) -> None:
    api = server.project()
    with _impatient(server) as url, closing(_connect(url)) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\n"
            + f"Authorization: Bearer {api.key}\r\n\r\n".encode()
            + b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'
        )
        assert _until_closed(raw).startswith(b"HTTP/1.1 408")
    assert api.rows() == 0
    eventually(lambda: api.objects() == [])


@contextmanager
def _impatient(server: Server) -> Iterator[str]:
    """The same app, served with little patience."""
    from service.wake import Waker
    from tests.integration.api_server import app_over

    with closing(Waker(server.settings.redis_url.get_secret_value())) as waker:
        app = app_over(server.settings, server.database, server.storage, waker)
        with serving(Envelope(app.app, clock=monotonic, patience_s=0.2)) as url:
            yield url


def _connect(url: str) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    raw.settimeout(30)
    return raw


def _until_closed(raw: socket.socket) -> bytes:
    pieces = []
    while piece := raw.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def _in_shape(reply: httpx.Response, status: int) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"].startswith("req_")
    assert set(reply.json()) == {"error"}
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
