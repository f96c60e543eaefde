"""How are backups made and restored from the command line?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from service.backup.archive import BackupError
from service.backup.restore import restore as bring_back
from service.backup.take import take
from service.cli.console import CommandError, say
from service.cli.database import reason
from service.stack.home import Home, HomeTaken
from service.storage import StorageError


def backup(home: Path, folder: Path, *, with_bytes: bool) -> None:
    """Make one, and say what it holds.

    Raises:
        CommandError: it could not be made; or it was, and the store lacks what the state names.
    """
    with _in_one_line():
        made = take(Home.at(home), folder, with_bytes=with_bytes, say=say)
    held = "their bytes" if made.with_bytes else "only their list"
    say(
        f"{folder} holds the state of {made.made_at:%Y-%m-%d %H:%M:%S %Z} and, of the "
        f"{made.objects} objects that it names ({made.bytes / 1e6:,.1f} MB), {held}."
    )
    if made.missing:
        raise CommandError(
            f"{made.missing} of them are not in the store; {folder / 'objects.jsonl'} says which."
        )


def restore(home: Path, folder: Path, *, replace: bool) -> None:
    """Bring one back, and say what is next.

    Raises:
        CommandError: it could not be brought back; or it was, and the store lacks what it names.
    """
    with _in_one_line():
        done = bring_back(Home.at(home), folder, replace=replace, say=say)
    say(
        f"{home} holds the state of {done.manifest.made_at:%Y-%m-%d %H:%M:%S %Z}. "
        f"Start it with: halfrate up --home {home}"
    )
    if done.absent:
        raise CommandError(
            f"{done.absent} of {done.manifest.objects} objects that the state names are not in "
            "the store; what needs them will fail."
        )


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except BackupError as error:
        raise CommandError(str(error)) from error
    except HomeTaken as error:
        raise CommandError(f"halfrate runs in {error}: `halfrate down` first.") from error
    except SQLAlchemyError as error:
        raise CommandError(reason(error)) from error
    except StorageError as error:
        raise CommandError(f"The object store does not do that: {error}") from error
    except OSError as error:
        raise CommandError(f"{error.filename or 'A file'}: {error.strerror}") from error
