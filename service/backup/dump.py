"""How does the state leave a database and come into an empty one? By Postgres's own programs."""

import subprocess
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from service.backup.archive import BackupError
from service.stack.programs import postgres_program

LOCK_WAIT = "60s"
"""Longest that a dump waits for a migration to be done."""


def dump(url: str, snapshot: str, file: Path) -> None:
    """Write the state as of that snapshot, whose transaction must stay open meanwhile.

    Raises:
        BackupError: pg_dump failed, and says why.
    """
    _run(
        "pg_dump",
        url,
        "--format=custom",
        f"--snapshot={snapshot}",
        f"--lock-wait-timeout={LOCK_WAIT}",
        "--no-owner",
        "--no-privileges",
        f"--file={file}",
    )


def load(url: str, file: Path) -> None:
    """Make the state of a dump in a database without tables.

    Raises:
        BackupError: pg_restore failed, and says why; the database is as it was then.
    """
    _run(
        "pg_restore",
        url,
        "--single-transaction",
        "--exit-on-error",
        "--no-owner",
        "--no-privileges",
        str(file),
    )
    # A dump holds no statistics, and plans made without them are bad ones.
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")


def _run(program: str, url: str, *arguments: str) -> None:
    address = conninfo_to_dict(url)
    # Anybody may read the arguments of a process; its environment is ours alone.
    password = str(address.pop("password", ""))
    ended = subprocess.run(
        [
            str(postgres_program(program)),
            f"--dbname={make_conninfo('', **address)}",
            "--no-password",
            *arguments,
        ],
        env={"PGPASSWORD": password, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise BackupError(f"{program} failed: {ended.stderr.strip()}")
