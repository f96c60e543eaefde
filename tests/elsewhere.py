"""How do tests go on with a batch in another place: another database, another bucket?"""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import psycopg
from psycopg import sql
from pydantic import SecretStr

from service.db.session import Database
from service.settings import Settings
from service.storage import Storage
from worker.resources import Resources


@contextmanager
def empty_database(url: str) -> Iterator[str]:
    """A database without tables, on the server of this one."""
    server, name = url.rsplit("/", 1)[0], f"empty_{uuid.uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield f"{server}/{name}"
    finally:
        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


def settings_elsewhere(settings: Settings, url: str) -> Settings:
    """The same settings with that database, and a bucket that is not there yet."""
    changed = {"database_url": SecretStr(url), "s3_bucket": f"test-{uuid.uuid4().hex[:16]}"}
    return settings.model_copy(update=changed)


@contextmanager
def resources_on(resources: Resources, settings: Settings) -> Iterator[Resources]:
    """What a worker on these settings holds."""
    with (
        closing(
            Database(settings.database_url.get_secret_value(), pool=8, application="elsewhere")
        ) as database,
        closing(Storage.from_settings(settings)) as storage,
    ):
        storage.ensure_bucket()
        yield replace(resources, settings=settings, database=database, storage=storage)
