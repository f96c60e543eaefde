"""What do tests of the stages stand on? A worker's resources, and a project with a pipeline.

All of them share one database and one bucket, which are made once; every test finds the database
empty.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
import structlog
from psycopg import sql
from sqlalchemy import text

from service.db.base import Base
from service.settings import Settings
from service.stack.parts import EmbeddedUrls
from tests.pipeline import MODELS, Pipeline
from worker import retry
from worker.resources import Resources, worker_name
from worker.settings import WorkerSettings


@pytest.fixture(scope="session")
def _stages(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resources]:
    server, template = urls.database_url.rsplit("/", 1)
    name = f"stages_{uuid.uuid4().hex}"
    clone = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(clone.format(sql.Identifier(name), sql.Identifier(template)))
    folder = tmp_path_factory.mktemp("stages")
    catalog = folder / "models.toml"
    catalog.write_text(MODELS, encoding="utf-8")
    settings = Settings(
        home=folder / "home",
        models=folder / "models",
        catalog=catalog,
        database_url=f"{server}/{name}",
        redis_url=urls.redis_url,
        s3_endpoint_url=urls.s3_endpoint_url,
        s3_access_key_id=urls.s3_access_key_id,
        s3_secret_access_key=urls.s3_secret_access_key,
        s3_bucket=f"stages-{uuid.uuid4().hex[:16]}",
        lease_s=30,
        renew_s=0.1,
        flush_s=0.2,
        tick_s=0.2,
    )
    name = worker_name(os.getpid())
    with closing(Resources.open(settings, WorkerSettings(), name=name)) as opened:
        opened.storage.ensure_bucket()
        yield opened


@pytest.fixture
def resources(_stages: Resources) -> Iterator[Resources]:
    """What a worker process holds; the database is empty."""
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    with _stages.database.transaction() as transaction:
        transaction.execute(text(f"TRUNCATE {tables} CASCADE"))
    configured = structlog.get_config()
    # The pretty tracebacks take most of a second each.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.stdlib.add_log_level, plain])
    yield _stages
    structlog.configure(**configured)


@pytest.fixture
def pipeline(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A project with a pipeline of its own. No line's retry is due before a test skips the wait."""
    monkeypatch.setattr(retry, "FIRST_DELAY_S", retry.LONGEST_DELAY_S)
    monkeypatch.setattr(retry, "luck", lambda: 0.999)
    return Pipeline.with_project(resources)
