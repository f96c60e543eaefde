"""What comes of more work than there is room for? An answer at once or soon, and no collapse."""

import asyncio
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.orm import Session

from service.api.deps import READERS, Parts
from service.db.session import RESTED_S, Database
from service.ids import Prefix, new_id, show
from service.settings import MIB, Settings
from service.storage import ObjectWriter, Storage
from service.wake import Waker
from tests.integration.api_server import Api, Server, app_over, eventually, serving

THREADS = 40
"""The framework's, for everything that is not told otherwise."""

FORM = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}


@contextmanager
def _api(
    settings: Settings, storage: Storage, *, pool: int = 4, patience_s: float = 5, **limits: int
) -> Iterator[tuple[Api, Parts]]:
    """A server with few places, and what it holds."""
    few = settings.model_copy(update=limits)
    url = settings.database_url.get_secret_value()
    with (
        closing(Database(url, pool=pool, application="test", patience_s=patience_s)) as database,
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
    ):
        envelope = app_over(few, database, storage, waker)
        assert isinstance(envelope.app, FastAPI)
        with serving(envelope) as at:
            yield Server(at, few, database, storage).project(), envelope.app.state.parts


def _poll(api: Api) -> httpx.Response:
    """What clients do most: here of a batch that is not there, which is a 404."""
    path = f"/v1/batches/{show(Prefix.BATCH, new_id())}"
    with api.http() as http:
        return http.get(path)


def _at_once(api: Api, number: int, method: str, path: str, **form: Any) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        headers = {"authorization": f"Bearer {api.key}"}
        async with httpx.AsyncClient(base_url=api.url, headers=headers, timeout=60) as http:
            return await asyncio.gather(
                *(http.request(method, path, **form) for _ in range(number))
            )

    return asyncio.run(all_of_them())


def _is_busy(reply: httpx.Response) -> None:
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "service_unavailable"
    assert 0 < int(reply.headers["retry-after"]) <= 120


def test_an_exhausted_pool_is_503_to_be_tried_again(settings: Settings, storage: Storage) -> None:
    with _api(settings, storage, pool=2, patience_s=0.2) as (api, parts):
        path = f"/v1/batches/{show(Prefix.BATCH, new_id())}"
        with parts.database.engine.connect(), parts.database.engine.connect():
            for reply in _at_once(api, THREADS + 20, "GET", path):
                _is_busy(reply)
            assert httpx.get(f"{api.url}/health/live").status_code == 200
        assert _poll(api).status_code == 404


def test_more_uploads_than_allowed_are_503_while_polls_are_answered(
    settings: Settings, storage: Storage
) -> None:
    with _api(settings, storage, max_uploads=1) as (api, parts), api.http() as http:
        with _begun_upload(api):
            eventually(lambda: parts.uploads.borrowed_tokens == 1)
            _is_busy(http.post("/v1/files", **FORM))
            assert _poll(api).status_code == 404
        eventually(lambda: parts.uploads.borrowed_tokens == 0)
        assert http.post("/v1/files", **FORM).status_code == 200


@contextmanager
def _begun_upload(api: Api) -> Iterator[None]:
    """An upload of which nothing more comes until it is broken off."""
    go_away = threading.Event()

    def body() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'
        go_away.wait(30)
        raise ConnectionAbortedError

    def send() -> None:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        with api.http() as http, pytest.raises(ConnectionAbortedError):
            http.post("/v1/files", content=body(), headers=headers)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        go_away.set()
        sender.join()


class _Hanging(ObjectWriter):
    """A writer whose store answers nothing for a while."""

    answers = threading.Event()

    def finish(self) -> None:
        assert self.answers.wait(30)
        super().finish()


class _HangingStorage(Storage):
    def writer(self, key: str) -> ObjectWriter:
        return _Hanging(self._client, self.bucket, key)


def test_uploads_into_a_store_that_hangs_leave_threads_for_polls(settings: Settings) -> None:
    with (
        closing(_HangingStorage.from_settings(settings)) as hanging,
        _api(settings, hanging) as (api, parts),
    ):
        hanging.ensure_bucket()
        replies: list[httpx.Response] = []

        def upload() -> None:
            replies.extend(_at_once(api, THREADS + 10, "POST", "/v1/files", **FORM))

        uploading = threading.Thread(target=upload)
        uploading.start()
        try:
            eventually(lambda: parts.uploads.borrowed_tokens == THREADS + 10)
            eventually(lambda: parts.writers.statistics().tasks_waiting > THREADS)
            for _ in range(20):
                assert _poll(api).status_code == 404
            assert replies == []
        finally:
            _Hanging.answers.set()
            uploading.join()
        assert [reply.status_code for reply in replies] == [200] * (THREADS + 10)


class _SilentStorage(Storage):
    """A store whose objects do not come for a while."""

    answers = threading.Event()

    def stream(
        self, key: str, start: int = 0, length: int | None = None, chunk: int = MIB
    ) -> Generator[bytes]:
        assert self.answers.wait(30)
        yield from super().stream(key, start, length, chunk)


def test_downloads_from_a_store_that_hangs_leave_threads_for_polls(settings: Settings) -> None:
    with (
        closing(_SilentStorage.from_settings(settings)) as silent,
        _api(settings, silent) as (api, parts),
    ):
        silent.ensure_bucket()
        with api.http() as http:
            file_id = http.post("/v1/files", **FORM).json()["id"]
        replies: list[httpx.Response] = []
        path = f"/v1/files/{file_id}/content"

        def download() -> None:
            replies.extend(_at_once(api, THREADS + 10, "GET", path))

        downloading = threading.Thread(target=download)
        downloading.start()
        try:
            eventually(lambda: parts.readers.statistics().tasks_waiting > THREADS - READERS)
            for _ in range(20):
                assert _poll(api).status_code == 404
            assert replies == []
        finally:
            _SilentStorage.answers.set()
            downloading.join()
        assert [reply.content for reply in replies] == [b"{}\n"] * (THREADS + 10)


# Connections that the server ended


@pytest.fixture
def time() -> list[float]:
    return [0.0]


@pytest.fixture
def resting(settings: Settings, time: list[float]) -> Iterator[Database]:
    url = settings.database_url.get_secret_value()
    with closing(Database(url, pool=1, application="t", clock=lambda: time[0])) as database:
        yield database


def _backend(session: Session) -> int:
    found = session.scalar(text("SELECT pg_backend_pid()"))
    assert isinstance(found, int)
    return found


def test_a_connection_that_was_cut_while_it_rested_is_made_anew(
    resting: Database, time: list[float], database: Database
) -> None:
    with resting.reading() as session:
        before = _backend(session)
    with database.transaction() as session:
        session.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": before})
    time[0] += RESTED_S
    with resting.transaction() as session:
        assert _backend(session) != before


def test_a_connection_that_was_cut_a_moment_ago_is_made_anew(
    resting: Database, database: Database
) -> None:
    """Its server's last words lie there to be read: no request has to fail to find it out."""
    with resting.reading() as session:
        before = _backend(session)
    with database.transaction() as session:
        session.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": before})
    with resting.reading() as session:
        assert _backend(session) != before


def test_a_read_sees_what_was_committed_before_it(resting: Database, database: Database) -> None:
    """A transaction would show both statements one state only where it were asked to: this must
    not keep a snapshot, nor a lock, nor a connection."""
    with database.transaction() as session:
        session.execute(text("CREATE TABLE seen (n int)"))
    with resting.reading() as reader:
        count = text("SELECT count(*) FROM seen")
        assert reader.scalar(count) == 0
        with database.transaction() as session:
            session.execute(text("INSERT INTO seen VALUES (1)"))
        assert reader.scalar(count) == 1
        idle = text("SELECT state FROM pg_stat_activity WHERE application_name = 't'")
        with database.transaction() as session:
            assert session.scalar(idle) == "idle"
            session.execute(text("DROP TABLE seen"))
