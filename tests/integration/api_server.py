"""How do tests reach the API? Over HTTP, on a real uvicorn server in a thread of its own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import boto3
import httpx
import openai
import uvicorn

from service.api.app import create_app
from service.api.envelope import Envelope
from service.catalog import Catalog
from service.db import keys
from service.db.models import Right
from service.db.session import Database
from service.settings import Settings
from service.storage import Storage
from service.wake import Waker

STARTS_WITHIN_S = 30


@dataclass(frozen=True)
class Api:
    """A running server, and the admin key of one project."""

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

    def other_key(self, right: Right = Right.ADMIN, *, project: str | None = None) -> str:
        """A key with that right, of this project or of another one."""
        with self.database.transaction() as session:
            owner = self.project_id
            if project is not None:
                owner = keys.create_project(session, project).id
            return keys.create_key(session, owner, "other", right)[1]

    def objects(self) -> list[str]:
        """Every key in the bucket, unfinished multipart uploads included."""
        with closing(self._s3()) as s3:
            bucket = self.settings.s3_bucket
            whole = s3.list_objects_v2(Bucket=bucket).get("Contents", [])
            unfinished = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
            return [entry["Key"] for entry in [*whole, *unfinished]]

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


@contextmanager
def api_over(settings: Settings, database: Database, storage: Storage) -> Iterator[Api]:
    """The API over the test's database and bucket, and a project `tests`."""
    with database.transaction() as session:
        project = keys.create_project(session, "tests")
        _, key = keys.create_key(session, project.id, "tests", Right.ADMIN)
    with (
        closing(Waker(settings.redis_url.get_secret_value())) as waker,
        serving(app_over(settings, database, storage, waker)) as url,
    ):
        yield Api(url, key, project.id, settings, database, storage)


def app_over(settings: Settings, database: Database, storage: Storage, waker: Waker) -> Envelope:
    """The app, not yet served."""
    return create_app(
        settings,
        database=database,
        storage=storage,
        waker=waker,
        catalog=Catalog.load(settings.catalog),
    )


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """A server that has started; stopped gracefully."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=5)
    )
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


def eventually(holds: Any, *, within_s: float = 20) -> None:
    """Returns as soon as `holds()` is true; fails when it has not become so in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
