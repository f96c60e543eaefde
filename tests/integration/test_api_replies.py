"""Has every answer the contract's shape and an id, whatever went wrong?"""

import io
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from sqlalchemy import select

from service.db.models import ApiKey, Right
from service.db.session import Database
from service.ids import Prefix
from service.settings import Settings
from service.stack.parts import EmbeddedUrls
from service.storage import Storage
from service.wake import Waker
from tests.integration.api_server import STUBS, Api, Server, api_server, app_over, serving


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert "detail" not in body
    return error


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1"),
        ("GET", "/v1/files/"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("GET", "/v1/%00"),
        ("GET", "/v1/%ED%A0%80"),
        ("GET", "/docs"),
    ],
)
def test_an_unknown_route_is_404_in_shape(api: Api, method: str, path: str) -> None:
    with api.http() as http:
        error = _error(http.request(method, path), 404)
    assert error["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", {"GET", "POST"}),
        ("PATCH", "/v1/batches", {"GET", "POST"}),
        ("DELETE", "/v1/models", {"GET"}),
        ("GET", "/v1/embeddings", {"POST"}),
        ("PUT", "/v1/batches/batch_1", {"GET", "DELETE"}),
        ("PUT", "/v1/files/file-1", {"GET", "DELETE"}),
        ("POST", "/openapi.json", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_405_and_says_which_are_right(
    api: Api, method: str, path: str, allowed: set[str]
) -> None:
    with api.http() as http:
        response = http.request(method, path)
    assert _error(response, 405)["code"] == "method_not_allowed"
    assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic dXNlcjpwYXNz", "sk-hr-x"])
def test_no_key_is_401_in_the_reference_s_words(api: Api, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    response = httpx.get(f"{api.url}/v1/models", headers=headers)
    error = _error(response, 401)
    assert error["message"].startswith("You didn't provide an API key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_a_wrong_key_is_401_and_is_not_repeated(api: Api) -> None:
    wrong = "sk-hr-" + "a" * 39 + "WXYZ"
    with api.http(wrong) as http:
        response = http.get("/v1/models")
    error = _error(response, 401)
    assert error["code"] == "invalid_api_key"
    assert error["message"] == "Incorrect API key provided: sk-hr-…WXYZ"
    with pytest.raises(openai.AuthenticationError), api.client(wrong) as client:
        client.models.list()


@pytest.mark.parametrize("key", ["x", "short", "sk-hr-short"])
def test_of_a_short_wrong_key_nothing_is_shown(api: Api, key: str) -> None:
    with api.http(key) as http:
        message = _error(http.get("/v1/models"), 401)["message"]
    assert key.removeprefix("sk-hr-") not in message.removeprefix("Incorrect API key provided")


@pytest.mark.parametrize(
    ("path", "before"), [("/v1/models", 200), (f"/v1/batches/{Prefix.BATCH}{'0' * 32}", 404)]
)
def test_a_revoked_key_is_401_from_then_on(api: Api, path: str, before: int) -> None:
    from service.db import keys

    other = api.other_key()
    with api.http(other) as http:
        assert http.get(path).status_code == before
        with api.database.transaction() as session:
            found = keys.find(session, other)
            assert found is not None
            keys.revoke(session, found.id)
        _error(http.get(path), 401)


def test_the_key_is_asked_for_before_the_body_is_looked_at(api: Api) -> None:
    for path, body in (("/v1/batches", b"not json"), ("/v1/files", b"not a form")):
        _error(httpx.post(f"{api.url}{path}", content=body), 401)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/batch_1/cancel"),
    ],
)
def test_a_reading_key_may_not_change_anything(api: Api, method: str, path: str) -> None:
    with api.http(api.other_key(Right.READ)) as http:
        error = _error(http.request(method, path), 403)
        assert error["type"] == "permission_error"
        assert http.get("/v1/files").status_code == 200


def test_the_use_of_a_key_is_stamped_once_a_minute(api: Api) -> None:
    def stamp() -> Any:
        with api.database.transaction() as session:
            return session.scalar(
                select(ApiKey.last_used_at).where(ApiKey.project_id == api.project_id)
            )

    with api.http() as http:
        assert stamp() is None
        http.get("/v1/models")
        first = stamp()
        http.get("/v1/models")
    assert first is not None
    assert stamp() == first


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "invalid_value"),
        ("limit=10001", "limit", "invalid_value"),
        ("limit=ten", "limit", "invalid_type"),
        ("limit=1.5", "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("after=nonsense", "after", "invalid_value"),
        ("after=file-00000000000000000000000000000000", "after", "invalid_value"),
        ("purpose=%00", "purpose", "invalid_value"),
    ],
)
def test_a_wrong_query_is_400_and_names_the_parameter(
    api: Api, query: str, param: str, code: str
) -> None:
    with api.http() as http:
        error = _error(http.get(f"/v1/files?{query}"), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000, b'{"endpoint": NaN}']
)
def test_a_body_that_is_no_object_is_400(api: Api, body: bytes) -> None:
    with api.http() as http:
        _error(http.post("/v1/batches", content=body), 400)


def test_a_key_no_answer_could_be_encoded_with_is_400(api: Api) -> None:
    with api.http() as http:
        error = _error(http.post("/v1/batches", content=b'{"\\ud800": 1}'), 400)
    assert error["message"]


def test_a_json_body_over_the_limit_is_413_before_it_is_read(api: Api) -> None:
    limit = api.settings.max_body_bytes
    with closing(socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])))) as raw:
        raw.sendall(
            b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + api.key.encode()
            + f"\r\nContent-Length: {limit + 1}\r\n\r\n{{".encode()
        )
        assert raw.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_json_body_that_does_not_say_its_size_is_counted(api: Api) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    with api.http() as http:
        error = _error(http.post("/v1/batches", content=endless()), 413)
    assert error["code"] == "body_too_large"


def test_every_request_has_an_id_of_its_own(api: Api) -> None:
    with api.http() as http:
        seen = {http.get("/v1/models").headers["x-request-id"] for _ in range(5)}
    assert len(seen) == 5


def test_a_crash_in_a_handler_is_500_in_shape_and_logged_with_the_id(
    settings: Settings, database: Database, storage: Storage
) -> None:
    with (
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
        LogOf("service.api.envelope") as log,
    ):
        envelope = app_over(settings, database, storage, waker)
        assert isinstance(envelope.app, FastAPI)
        envelope.app.add_api_route("/crash", _crash)
        with serving(envelope) as url:
            response = httpx.get(f"{url}/crash")
    error = _error(response, 500)
    assert error["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in log.getvalue()
    assert "request crashed" in log.getvalue()


def test_a_crash_outside_of_the_app_has_shape_and_id_too() -> None:
    from service.api.envelope import Envelope
    from service.clock import monotonic

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        raise RuntimeError("secret")

    with serving(Envelope(broken, clock=monotonic)) as url:
        _error(httpx.get(f"{url}/"), 500)


def test_a_database_that_is_away_is_503_to_be_tried_again(
    settings: Settings, storage: Storage
) -> None:
    with (
        closing(socket.socket()) as taken,
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
    ):
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        url = f"postgresql://nobody@127.0.0.1:{taken.getsockname()[1]}/none"
        with (
            closing(Database(url, pool=2, application="test")) as away,
            serving(app_over(settings, away, storage, waker)) as at,
        ):
            response = httpx.get(f"{at}/v1/models", headers={"authorization": "Bearer x"})
    assert _error(response, 503)["code"] == "service_unavailable"
    assert 0 < int(response.headers["retry-after"]) <= 120


def test_the_openapi_document_says_what_is_answered(api: Api) -> None:
    document = httpx.get(f"{api.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
            assert operation["tags"], (method, path)
            assert ("security" in operation) == path.startswith("/v1/"), (method, path)
            if path.startswith("/v1/"):
                error = operation["responses"]["401"]["content"]["application/json"]["schema"]
                assert error == {"$ref": "#/components/schemas/ErrorReply"}
    named = set(_references(document))
    assert {f"#/components/schemas/{name}" for name in schemas} >= named
    assert "#/components/schemas/CreateBatch" in named


def _references(node: Any) -> Iterator[str]:
    match node:
        case dict():
            for key, value in node.items():
                if key == "$ref":
                    yield value
                else:
                    yield from _references(value)
        case list():
            for value in node:
                yield from _references(value)


def _crash() -> None:
    raise RuntimeError("secret")


class LogOf:
    """What is logged under that name meanwhile, as JSON lines."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._out = io.StringIO()
        self._handler = logging.StreamHandler(self._out)

    def __enter__(self) -> io.StringIO:
        import structlog

        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=json.dumps),
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
        )
        self._logger.addHandler(self._handler)
        return self._out

    def __exit__(self, *_: object) -> None:
        import structlog

        self._logger.removeHandler(self._handler)
        structlog.reset_defaults()
