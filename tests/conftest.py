"""What do tests stand on? Real Postgres, Valkey and SeaweedFS; a fresh database and bucket each."""

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from service.db.migrate import upgrade
from service.db.session import Database
from service.settings import Settings
from service.stack.parts import EmbeddedUrls, embedded
from service.storage import Storage

# Triton's kernels run in its interpreter where there is no device for them. It must be told before
# triton is imported, which torch does wherever it is installed.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # noqa: TID251

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
default_max_tokens = 16
"""


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedUrls]:
    """The three programs, started once for each test process."""
    with embedded(tmp_path_factory.mktemp("stack")) as running:
        upgrade(running.database_url)
        yield running


@pytest.fixture
def database_url(urls: EmbeddedUrls) -> Iterator[str]:
    """A database of the test's own, cloned from the migrated one."""
    name = f"test_{uuid.uuid4().hex}"
    template = urls.database_url.rsplit("/", 1)[-1]
    server = urls.database_url.rsplit("/", 1)[0] + "/postgres"
    clone = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(clone.format(sql.Identifier(name), sql.Identifier(template)))
    yield f"{urls.database_url.rsplit('/', 1)[0]}/{name}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def stub_catalog(tmp_path: Path) -> Path:
    """A models.toml whose models need no weights."""
    path = tmp_path / "models.toml"
    path.write_text(STUBS, encoding="utf-8")
    return path


@pytest.fixture
def settings(urls: EmbeddedUrls, database_url: str, stub_catalog: Path, tmp_path: Path) -> Settings:
    """Settings for the three programs, with a rhythm quick enough for tests."""
    return Settings(
        home=tmp_path / "home",
        models=tmp_path / "models",
        catalog=stub_catalog,
        database_url=database_url,
        redis_url=urls.redis_url,
        s3_endpoint_url=urls.s3_endpoint_url,
        s3_access_key_id=urls.s3_access_key_id,
        s3_secret_access_key=urls.s3_secret_access_key,
        s3_bucket=f"test-{uuid.uuid4().hex[:16]}",
        lease_s=2,
        renew_s=0.2,
        flush_s=0.2,
        tick_s=0.2,
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """The test's database, opened."""
    with closing(
        Database(settings.database_url.get_secret_value(), pool=8, application="test")
    ) as opened:
        yield opened


@pytest.fixture
def storage(settings: Settings) -> Iterator[Storage]:
    """The test's bucket."""
    with closing(Storage.from_settings(settings)) as opened:
        opened.ensure_bucket()
        yield opened
