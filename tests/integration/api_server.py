"""How do tests reach the API? Over HTTP, on a real uvicorn server in a thread of its own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import boto3
import httpx
import openai
import psycopg
import structlog
import uvicorn
from fastapi import FastAPI
from psycopg import sql
from pydantic import SecretStr
from sqlalchemy import func, select, text

from service.api.app import create_app
from service.api.envelope import Envelope
from service.api.listen import config
from service.catalog import DEFAULT_CATALOG, Catalog
from service.db import keys
from service.db.models import File, Right
from service.db.session import Database
from service.settings import MIB, Settings
from service.stack.parts import EmbeddedUrls
from service.storage import Storage
from service.wake import Waker

STARTS_WITHIN_S = 30

LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'

STUBS = """
[[models]]
id = "stub-embed"
kind = "embed"
source = "stub:"
price_input = 0.02

[[models]]
id = "stub-chat"
kind = "generate"
source = "stub:"
price_input = 0.10
price_output = 0.40
"""


@dataclass(frozen=True)
class Api:
    """A running server, and one project's admin key."""

    url: str
    key: str
    project_id: UUID
    settings: Settings
    database: Database
    storage: Storage

    @contextmanager
    def client(self, key: str | None = None, *, retries: int = 0) -> Iterator[openai.OpenAI]:
        """The official client, unmodified."""
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=retries
        ) as client:
            yield client

    @contextmanager
    def http(self, key: str | None = None) -> Iterator[httpx.Client]:
        """Plain HTTP with the key in its header."""
        headers = {"authorization": f"Bearer {key or self.key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60) as client:
            yield client

    def other_key(self, right: Right = Right.ADMIN, *, elsewhere: bool = False) -> str:
        """A key with that right, of this project or of another one."""
        with self.database.transaction() as session:
            owner = self.project_id
            if elsewhere:
                owner = keys.create_project(session, f"other {uuid4().hex}").id
            return keys.create_key(session, owner, "other", right)[1]

    def upload(self, data: bytes = LINES, name: str = "a.jsonl", **more: Any) -> Any:
        """A file for batches, put up by the official client."""
        with self.client() as client:
            return client.files.create(file=(name, data), **{"purpose": "batch", **more})

    def post_file(self, **form: Any) -> httpx.Response:
        """POST /v1/files of whatever form."""
        with self.http() as http:
            return http.post("/v1/files", **form)

    def rows(self) -> int:
        """How many files of the project the table holds."""
        with self.database.transaction() as session:
            query = select(func.count()).select_from(File)
            return session.scalar(query.where(File.project_id == self.project_id)) or 0

    def waiting(self) -> int:
        """How many locks are waited for in the database."""
        query = text(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        with self.database.transaction() as session:
            return session.scalar(query) or 0

    def objects(self) -> list[str]:
        """The project's keys in the bucket, unfinished multipart uploads included."""
        with closing(self._s3()) as s3:
            bucket = self.settings.s3_bucket
            whole = s3.list_objects_v2(Bucket=bucket).get("Contents", [])
            unfinished = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            keys_there = [entry["Key"] for entry in [*whole, *unfinished]]
            return [key for key in keys_there if self.project_id.hex in key]

    def _s3(self) -> Any:
        key, secret = self.settings.s3_access_key_id, self.settings.s3_secret_access_key
        assert key is not None
        assert secret is not None
        return boto3.client(
            "s3",
            endpoint_url=self.settings.s3_endpoint_url,
            region_name=self.settings.s3_region,
            aws_access_key_id=key.get_secret_value(),
            aws_secret_access_key=secret.get_secret_value(),
        )


@dataclass(frozen=True)
class Server:
    """A server that several tests share; each has a project of its own, and sees no other."""

    url: str
    settings: Settings
    database: Database
    storage: Storage

    def project(self) -> Api:
        """A new project and its admin key."""
        with self.database.transaction() as session:
            project = keys.create_project(session, f"test {uuid4().hex}")
            _, key = keys.create_key(session, project.id, "tests", Right.ADMIN)
        return Api(self.url, key, project.id, self.settings, self.database, self.storage)


@contextmanager
def api_server(urls: EmbeddedUrls, models_toml: Path) -> Iterator[Server]:
    """The API over a database and a bucket of its own, taking files of up to 40 MiB."""
    with clone_of(urls) as database_url:
        settings = Settings(
            catalog=models_toml,
            database_url=SecretStr(database_url),
            redis_url=SecretStr(urls.redis_url),
            s3_endpoint_url=urls.s3_endpoint_url,
            s3_access_key_id=SecretStr(urls.s3_access_key_id),
            s3_secret_access_key=SecretStr(urls.s3_secret_access_key),
            s3_bucket=f"api-{uuid4().hex[:16]}",
            max_file_bytes=40 * MIB,
        )
        with (
            closing(Database(database_url, pool=8, application="test")) as database,
            closing(Storage.from_settings(settings)) as storage,
            closing(Waker(urls.redis_url)) as waker,
        ):
            storage.ensure_bucket()
            with serving(app_over(settings, database, storage, waker)) as url:
                yield Server(url, settings, database, storage)


@contextmanager
def clone_of(urls: EmbeddedUrls) -> Iterator[str]:
    """A copy of the migrated database."""
    server, template = urls.database_url.rsplit("/", 1)
    name = f"api_{uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        try:
            yield f"{server}/{name}"
        finally:
            connection.execute(
                sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            )


@contextmanager
def api_over(settings: Settings, database: Database, storage: Storage) -> Iterator[Api]:
    """A server for one test, over parts that the test brings."""
    with (
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
        serving(app_over(settings, database, storage, waker)) as url,
    ):
        yield Server(url, settings, database, storage).project()


def app_over(settings: Settings, database: Database, storage: Storage, waker: Waker) -> Envelope:
    """The app, not yet served."""
    return create_app(
        settings,
        database=database,
        storage=storage,
        waker=waker,
        catalog=Catalog.load(settings.catalog),
    )


def document_of_nowhere() -> dict[str, Any]:
    """The OpenAPI document, for tests that are made of it: known before anything runs."""
    nowhere = SecretStr("redis://127.0.0.1:1/0")
    settings = Settings(
        catalog=DEFAULT_CATALOG,
        database_url=SecretStr("postgresql://127.0.0.1:1/none"),
        redis_url=nowhere,
        s3_endpoint_url="http://127.0.0.1:1",
    )
    with (
        closing(Database(settings.database_url.get_secret_value(), pool=1, application="")) as none,
        closing(Storage.from_settings(settings)) as storage,
        closing(Waker(nowhere.get_secret_value())) as waker,
    ):
        app = app_over(settings, none, storage, waker).app
    assert isinstance(app, FastAPI)
    return app.openapi()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """A server that has started; stopped gracefully. What it logs goes to pytest's records."""
    logged = structlog.get_config()
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    # With its protocol named, or asyncio would leave Nagle's algorithm on: 40 ms a reply.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(config(app, shutdown_s=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        structlog.configure(**logged)


def eventually(holds: Any, *, within_s: float = 20) -> None:
    """Returns as soon as `holds()` is true; fails when it has not become so in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
