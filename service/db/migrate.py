"""How is a database brought to the tables of this program, and is it there already?

From a checkout or an installed wheel: migrations are found beside `service`.
"""

import importlib.util

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

_log = structlog.get_logger(__name__)


class WrongTables(RuntimeError):
    """The database has not the tables of this program; the message says what to run."""


def upgrade(url: str) -> None:
    """Run every migration that this database lacks; none is fine.

    Raises:
        WrongTables: it is newer than this program.
        RuntimeError: the migrations are not installed.
        sqlalchemy.exc.SQLAlchemyError: the database is away, or refuses.
    """
    _check_known(revision_of(url))
    command.upgrade(_config(url), "head")


def migrate_to(url: str, revision: str) -> None:
    """Migrate up or back to that revision. On the way back, what the older tables have no place for
    is lost.

    Raises:
        WrongTables: this program does not know the revision, or the one that the database has.
        sqlalchemy.exc.SQLAlchemyError: the database is away, or refuses.
    """
    known = revisions()
    found = revision_of(url)
    _check_known(found)
    if revision not in known:
        raise WrongTables(f"There is no revision {revision}; known are {', '.join(known)}.")
    if found is not None and known.index(revision) < known.index(found):
        command.downgrade(_config(url), revision)
    else:
        command.upgrade(_config(url), revision)


def refuse_other_tables(url: str) -> None:
    """For a process that starts: let it go no further on tables that it was not made for.

    A database that does not answer is passed over: whoever needs it says so.

    Raises:
        WrongTables: the database has not the newest tables that this program knows.
    """
    try:
        found = revision_of(url)
    except SQLAlchemyError as error:
        _log.warning("tables not checked", reason=str(error).splitlines()[0])
        return
    newest = revisions()[-1]
    if found is None:
        raise WrongTables("The database has no tables yet: run `halfrate migrate`.")
    _check_known(found)
    if found != newest:
        raise WrongTables(
            f"The database has the tables of revision {found}, and this program needs {newest}: "
            "run `halfrate migrate`."
        )


def revisions() -> list[str]:
    """All that this program knows, oldest first."""
    scripts = ScriptDirectory.from_config(_config())
    return [script.revision for script in scripts.walk_revisions()][::-1]


def revision_of(url: str) -> str | None:
    """What the database was last migrated to; None where it never was.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: it does not answer.
    """
    engine = create_engine(
        make_url(url).set(drivername="postgresql+psycopg"),
        poolclass=NullPool,
        connect_args={"connect_timeout": 5},
    )
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def _check_known(found: str | None) -> None:
    known = revisions()
    if found is not None and found not in known:
        raise WrongTables(
            f"The database has the tables of revision {found}, and this program knows them up to "
            f"{known[-1]}: run a newer halfrate, or take the database back first, with the newer "
            f"one's `halfrate migrate --to {known[-1]}`."
        )


def _config(url: str | None = None) -> Config:
    # Found without importing: Alembic runs the environment itself.
    spec = importlib.util.find_spec("migrations")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("The package `migrations` is not installed beside `service`.")
    config = Config()
    # Alembic interpolates percent signs, which a path or a password may hold.
    config.set_main_option("script_location", spec.submodule_search_locations[0].replace("%", "%%"))
    config.attributes["url"] = url
    return config
