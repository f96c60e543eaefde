"""Which database does a command work on, and how is it migrated?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from service.cli.console import CommandError, say
from service.db.migrate import WrongTables, migrate_to, upgrade
from service.db.session import Database
from service.settings import PartUrls
from service.stack.home import Home
from service.stack.record import read_record


@contextmanager
def opened(home: Path) -> Iterator[Database]:
    """The database of the environment, else the one of the home's stack.

    Raises:
        CommandError: there is none, or it does not answer.
    """
    database = Database(url_of(home), pool=1, application="halfrate")
    try:
        yield database
    except SQLAlchemyError as error:
        raise CommandError(reason(error)) from error
    finally:
        database.close()


def migrate(home: Path, revision: str | None = None) -> None:
    """Run what the database lacks; or bring it to that revision, which may be an older one."""
    try:
        if revision is None:
            upgrade(url_of(home))
        else:
            migrate_to(url_of(home), revision)
    except SQLAlchemyError as error:
        raise CommandError(reason(error)) from error
    except WrongTables as error:
        raise CommandError(str(error)) from error
    say("The database is up to date." if revision is None else f"The database is at {revision}.")


def url_of(home: Path) -> str:
    """Where the database is.

    Raises:
        CommandError: neither the environment nor the home says so.
    """
    given = PartUrls().database_url
    if given is not None:
        return given.get_secret_value()
    place = Home.at(home)
    recorded = read_record(place).environment.get("HALFRATE_DATABASE_URL")
    if recorded is None:
        raise CommandError(
            f"No database: set HALFRATE_DATABASE_URL, or run `halfrate up --home {home}` first."
        )
    return recorded


def reason(error: SQLAlchemyError) -> str:
    """One line, without what was sent."""
    # The driver's own first line; the rest is SQL and its parameters.
    said = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"The database does not do that: {said[0] if said else type(error).__name__}"
