"""Do the migrations make exactly the tables of the models, whoever runs them?"""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from psycopg import sql

from service.db.base import Base
from service.db.migrate import upgrade
from service.stack.parts import EmbeddedUrls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_url(urls: EmbeddedUrls) -> Iterator[str]:
    """A database without any table."""
    server, name = urls.database_url.rsplit("/", 1)[0], f"empty_{uuid.uuid4().hex}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield f"{server}/{name}"
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} (FORCE)").format(sql.Identifier(name)))


def config(url: str) -> Config:
    made = Config(toml_file=ROOT / "pyproject.toml")
    made.attributes["url"] = url
    return made


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
    return {row[0] for row in rows} - {"alembic_version"}


def test_migrating_makes_the_tables_of_the_models_and_twice_is_once(empty_url: str) -> None:
    upgrade(empty_url)
    upgrade(empty_url)
    assert tables(empty_url) == set(Base.metadata.tables)
    command.check(config(empty_url))


def test_every_constraint_of_the_models_stands_in_the_database(empty_url: str) -> None:
    """Alembic's own comparison passes over CHECKs."""
    upgrade(empty_url)
    with psycopg.connect(empty_url) as connection:
        rows = connection.execute(
            "SELECT conname FROM pg_constraint WHERE contype IN ('c', 'u', 'p', 'f')"
        ).fetchall()
    wanted = {
        str(constraint.name)
        for table in Base.metadata.sorted_tables
        for constraint in table.constraints
    }
    assert wanted <= {row[0] for row in rows}


def test_migrating_back_leaves_nothing(empty_url: str) -> None:
    upgrade(empty_url)
    command.downgrade(config(empty_url), "base")
    assert tables(empty_url) == set()
    upgrade(empty_url)
    assert tables(empty_url) == set(Base.metadata.tables)


def test_two_that_migrate_at_once_do_it_once(empty_url: str) -> None:
    program = "import sys; from service.db.migrate import upgrade; upgrade(sys.argv[1])"
    starting = [
        subprocess.Popen([sys.executable, "-c", program, empty_url], cwd=ROOT) for _ in range(2)
    ]
    assert [process.wait(60) for process in starting] == [0, 0]
    assert tables(empty_url) == set(Base.metadata.tables)
