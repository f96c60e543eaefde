"""Can tables be brought to a newer revision and back in the middle of the work, and does a program
of another version say so?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from service.db.migrate import WrongTables, migrate_to, revision_of, revisions, upgrade
from service.settings import Settings
from tests import invariants
from tests.elsewhere import empty_database, resources_on, settings_elsewhere
from tests.integration.test_backup import in_every_phase
from tests.pipeline import Pipeline, embedding_line
from worker.resources import Resources

ROOT = Path(__file__).parents[2]
NEWEST = revisions()[-1]
BEFORE = revisions()[-2]


@pytest.fixture
def apart(resources: Resources) -> Iterator[Pipeline]:
    """A pipeline on a database of its own, which may be migrated."""
    settings = resources.settings
    with empty_database(settings.database_url.get_secret_value()) as url:
        upgrade(url)
        with resources_on(resources, settings_elsewhere(settings, url)) as own:
            yield Pipeline.with_project(own)


def url_of(pipeline: Pipeline) -> str:
    return pipeline.resources.settings.database_url.get_secret_value()


def down_and_up(pipeline: Pipeline, revision: str) -> None:
    migrate_to(url_of(pipeline), revision)
    assert revision_of(url_of(pipeline)) == revision
    upgrade(url_of(pipeline))
    assert revision_of(url_of(pipeline)) == NEWEST


@pytest.mark.parametrize("revision", revisions()[:-1])
def test_batches_of_every_phase_survive_the_way_down_and_up_again(
    apart: Pipeline, revision: str
) -> None:
    batches = in_every_phase(apart)

    down_and_up(apart, revision)

    apart.lose_workers()
    for batch_id in batches.values():
        apart.finish(batch_id)
        # Behind 0004 what the engine took is forgotten, but nothing that a client is promised.
        invariants.check(apart, batch_id)


def test_a_worker_that_holds_a_claim_goes_on_after_the_way_down_and_up(apart: Pipeline) -> None:
    batch_id = apart.submit([embedding_line(f"{n}") for n in range(40)])
    apart.validate()
    apart.plan()
    with apart.engine() as drain:
        shard = drain._claim()
        assert shard is not None
        down_and_up(apart, BEFORE)
        drain._run(shard)
    apart.finish(batch_id)
    assert invariants.check(apart, batch_id).completed == 40


def test_a_migration_gives_up_on_a_table_that_is_held_and_changes_nothing(apart: Pipeline) -> None:
    """It would queue behind the holder, and everybody else behind it."""
    url = url_of(apart)
    migrate_to(url, BEFORE)
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE batches IN ROW EXCLUSIVE MODE")
        with pytest.raises(Exception, match="lock timeout"):
            upgrade(url)
        assert revision_of(url) == BEFORE
    upgrade(url)
    assert revision_of(url) == NEWEST


# --- Programs of another version -----------------------------------------------------------------


def process(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as it would be started beside these parts; it must end by itself."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # noqa: TID251 - for a child
    key, secret = settings.s3_access_key_id, settings.s3_secret_access_key
    assert key is not None
    assert secret is not None
    return subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=ROOT,
        env={
            **inherited,
            "HALFRATE_DATABASE_URL": settings.database_url.get_secret_value(),
            "HALFRATE_REDIS_URL": settings.redis_url.get_secret_value(),
            "HALFRATE_S3_ENDPOINT_URL": settings.s3_endpoint_url or "",
            "HALFRATE_S3_ACCESS_KEY_ID": key.get_secret_value(),
            "HALFRATE_S3_SECRET_ACCESS_KEY": secret.get_secret_value(),
            "HALFRATE_S3_BUCKET": settings.s3_bucket,
            "HALFRATE_CATALOG": str(settings.catalog),
            "HALFRATE_PORT": "0",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(settings: Settings, *arguments: str) -> str:
    """The last line on stderr of a command that fails, without a traceback."""
    ended = process(settings, *arguments)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def make_newer(settings: Settings) -> None:
    with psycopg.connect(settings.database_url.get_secret_value()) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")


PROCESSES = {
    "api": ("run", "api"),
    "CPU worker": ("run", "cpu"),
    "engine worker": ("run", "engine", "--model=stub-embed"),
}


@pytest.mark.parametrize("name", list(PROCESSES))
def test_a_process_refuses_older_tables_and_says_what_to_run(settings: Settings, name: str) -> None:
    migrate_to(settings.database_url.get_secret_value(), BEFORE)

    said = refused(settings, *PROCESSES[name])

    assert f"revision {BEFORE}, and this program needs {NEWEST}" in said
    assert "run `halfrate migrate`" in said


@pytest.mark.parametrize("name", ["api", "engine worker"])
def test_a_process_refuses_newer_tables_and_says_what_to_run(settings: Settings, name: str) -> None:
    make_newer(settings)

    said = refused(settings, *PROCESSES[name])

    assert f"revision 9999, and this program knows them up to {NEWEST}" in said
    assert f"halfrate migrate --to {NEWEST}" in said


def test_a_process_refuses_a_database_without_tables(settings: Settings) -> None:
    with empty_database(settings.database_url.get_secret_value()) as url:
        bare = settings_elsewhere(settings, url)
        assert "no tables yet: run `halfrate migrate`" in refused(bare, "run", "cpu")


def test_the_command_migrates_back_and_on(settings: Settings) -> None:
    assert f"is at {BEFORE}" in process(settings, "migrate", f"--to={BEFORE}").stdout
    assert "up to date" in process(settings, "migrate").stdout
    assert "There is no revision 7" in refused(settings, "migrate", "--to=7")
    make_newer(settings)
    assert "run a newer halfrate" in refused(settings, "migrate")
    with pytest.raises(WrongTables):
        migrate_to(settings.database_url.get_secret_value(), BEFORE)
