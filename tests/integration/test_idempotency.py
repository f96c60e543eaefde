"""Does a call that is sent again under its Idempotency-Key make its object once?"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import func, select, text, update

from service.db import idempotency
from service.db.models import Batch
from service.db.session import now
from service.db.upload_models import IdempotencyKey, KeyedRoute, Upload
from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import LINES, STUBS, Api, Server, api_server, eventually

KEY = "idempotency-key"
Call = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


@pytest.fixture(params=list(KeyedRoute))
def call(request: pytest.FixtureRequest, api: Api) -> Call:
    """One of the routes that take a key: called with the key, and with content that may differ."""
    route: KeyedRoute = request.param
    input_file_id = api.upload().id if route is KeyedRoute.BATCHES else None

    def made(key: str | None, content: str = "a", *, good: bool = True) -> httpx.Response:
        headers = {} if key is None else {KEY: key}
        with api.http() as http:
            if route is KeyedRoute.FILES:
                return http.post(
                    "/v1/files",
                    files={"file": ("a.jsonl" if good else "a.csv", content.encode())},
                    data={"purpose": "batch"},
                    headers=headers,
                )
            body: dict[str, Any]
            if route is KeyedRoute.UPLOADS:
                body = {"bytes": 5, "filename": "a.jsonl", "mime_type": content, "purpose": "batch"}
                body |= {} if good else {"filename": "a.csv"}
            else:
                body = {
                    "input_file_id": input_file_id if good else "file-0",
                    "endpoint": "/v1/embeddings",
                    "completion_window": "24h",
                    "metadata": {"content": content},
                }
            return http.post(f"/v1/{route}", json=body, headers=headers)

    return made


def count(api: Api) -> int:
    """Objects that calls have made."""
    with api.database.transaction() as session:
        found = [
            session.scalar(
                select(func.count()).select_from(table).where(table.project_id == api.project_id)
            )
            for table in (Upload, Batch)
        ]
    return sum(number or 0 for number in found) + api.rows()


def test_the_same_call_gives_the_same_object(api: Api, call: Call) -> None:
    before = count(api)
    first, again = call("k"), call("k")
    assert (first.status_code, again.status_code) == (200, 200), again.text
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-type"] == "application/json"
    assert count(api) == before + 1
    assert len(api.objects()) == api.rows()


def test_without_a_key_or_with_another_one_a_call_is_new(api: Api, call: Call) -> None:
    replies = [call(None), call(None), call("k"), call("l")]
    assert len({reply.json()["id"] for reply in replies}) == 4


def test_other_content_is_409_and_is_not_retried(api: Api, call: Call) -> None:
    call("k")
    before = count(api), len(api.objects())
    response = call("k", "b")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "idempotency_key_reused"
    assert response.headers["x-should-retry"] == "false"
    assert (count(api), len(api.objects())) == before


def test_twins_at_once_give_one_object(api: Api, call: Call) -> None:
    before = count(api)
    start = threading.Barrier(6)

    def twin() -> httpx.Response:
        start.wait(20)
        return call("k")

    with ThreadPoolExecutor(6) as threads:
        replies = [twin.result() for twin in [threads.submit(twin) for _ in range(6)]]
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert sum("idempotency-replayed" not in reply.headers for reply in replies) == 1
    assert count(api) == before + 1
    assert len(api.objects()) == api.rows()


def test_of_different_calls_at_once_one_is_made(api: Api, call: Call) -> None:
    before = count(api)
    start = threading.Barrier(4)

    def other(content: str) -> httpx.Response:
        start.wait(20)
        return call("k", content)

    with ThreadPoolExecutor(4) as threads:
        replies = [each.result() for each in [threads.submit(other, c) for c in "abcd"]]
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409]
    assert count(api) == before + 1


def test_a_twin_waits_for_the_one_in_flight(api: Api, call: Call) -> None:
    route = KeyedRoute(call("other").request.url.path.removeprefix("/v1/"))
    before = count(api)
    with ThreadPoolExecutor(1) as beside:
        with api.database.transaction() as session:
            idempotency.wait_for_twin(session, api.project_id, route, "k")
            twin = beside.submit(call, "k")
            eventually(lambda: api.waiting() > 0)
            assert count(api) == before
            assert not twin.done()
        assert twin.result().status_code == 200


def test_a_refused_call_leaves_its_key_free(api: Api, call: Call) -> None:
    assert call("k", good=False).status_code == 400
    assert call("k").status_code == 200


def test_a_call_that_dies_leaves_its_key_free(
    api: Api, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = count(api), len(api.objects())

    def dies(*_: Any) -> None:
        raise RuntimeError("killed just before the commit")

    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "add", dies)
        assert call("k").status_code == 500
    assert (count(api), len(api.objects())) == before
    assert call("k").status_code == 200


def test_a_key_is_free_again_when_it_has_run_out(api: Api, call: Call) -> None:
    first = call("k")
    with api.database.transaction() as session:
        at = now(session)
        of_project = IdempotencyKey.project_id == api.project_id
        found = session.scalars(select(IdempotencyKey).where(of_project)).one()
        assert found.expires_at - found.created_at == timedelta(hours=24)
        session.execute(update(IdempotencyKey).where(of_project).values(expires_at=at))
    other = call("k", "b")
    assert other.status_code == 200
    assert other.json()["id"] != first.json()["id"]


def test_a_key_says_nothing_in_another_project(api: Api, server: Server) -> None:
    other = server.project()
    ids = set()
    for project in (api, other):
        with project.http() as http:
            form = {"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch"}}
            ids.add(http.post("/v1/files", **form, headers={KEY: "k"}).json()["id"])
    assert len(ids) == 2


def test_a_key_says_nothing_on_another_route(api: Api) -> None:
    with api.http() as http:
        form = {"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch"}}
        made = http.post("/v1/files", **form, headers={KEY: "k"})
        body = {"bytes": 5, "filename": "a.jsonl", "mime_type": "x", "purpose": "batch"}
        upload = http.post("/v1/uploads", json=body, headers={KEY: "k"})
    assert (made.status_code, upload.status_code) == (200, 200)


@pytest.mark.parametrize("key", ["", "k" * 256, b"\xc3\xa9", "a\tb"])
def test_a_key_that_is_none_is_400_and_nothing_is_made(api: Api, key: str | bytes) -> None:
    with api.http() as http:
        for path in ("/v1/files", "/v1/uploads", "/v1/batches"):
            response = http.post(path, content=b"x", headers={KEY: key})
            assert response.status_code == 400, response.text
    assert count(api) == 0


@pytest.mark.parametrize("key", ["k" * 255, "~ a b!", "0"])
def test_any_printable_key_is_taken(call: Call, key: str) -> None:
    assert call(key).json() == call(key).json()


def test_the_official_client_may_send_one(api: Api) -> None:
    with api.client() as client:
        made = [
            client.files.create(
                file=("a.jsonl", LINES), purpose="batch", extra_headers={"Idempotency-Key": "k"}
            )
            for _ in range(2)
        ]
        assert made[0] == made[1]
        with pytest.raises(openai.ConflictError):
            client.files.create(
                file=("b.jsonl", LINES), purpose="batch", extra_headers={"Idempotency-Key": "k"}
            )


def test_the_order_of_keys_in_a_body_is_no_content(api: Api) -> None:
    pairs = {"bytes": 5, "filename": "a.jsonl", "mime_type": "x", "purpose": "batch"}
    with api.http() as http:
        replies = [
            http.post(
                "/v1/uploads",
                content=json.dumps(dict(order)),
                headers={KEY: "k", "content-type": "application/json"},
            ).json()
            for order in (pairs.items(), reversed(pairs.items()))
        ]
    assert replies[0] == replies[1]


def test_what_was_answered_once_is_answered_after_the_object_is_gone(api: Api) -> None:
    form = {"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch"}}
    with api.http() as http:
        first = http.post("/v1/files", **form, headers={KEY: "k"}).json()
        http.delete(f"/v1/files/{first['id']}")
        assert http.post("/v1/files", **form, headers={KEY: "k"}).json() == first
    assert api.objects() == []


def test_a_wait_for_a_twin_is_bounded(api: Api) -> None:
    with api.database.transaction() as session:
        idempotency.wait_for_twin(session, api.project_id, KeyedRoute.FILES, "k")
        assert session.execute(text("SHOW lock_timeout")).scalar_one() == "10s"
    with api.database.transaction() as session:
        assert session.execute(text("SHOW lock_timeout")).scalar_one() == "0"
