"""How is the embedded Postgres prepared and started, as root too?"""

import os
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from signal import Signals

import psutil
import psycopg
from psycopg import sql

from service.stack.part import Part, StackError, StopStep
from service.stack.ports import LOOPBACK
from service.stack.programs import postgres_program

NAME = "postgres"
ROLE = "halfrate"
DATABASE = "halfrate"
# Postgres refuses to run as root. Any other uid will do, and this one needs no account.
NOBODY = 65_534
PGDATA_MODE = 0o700


def database_url(port: int, password: str, database: str = DATABASE) -> str:
    """Where clients find it."""
    return f"postgresql://{ROLE}:{password}@{LOOPBACK}:{port}/{database}"


def prepare_postgres(folder: Path, *, port: int, password: str, durable: bool = True) -> Part:
    """Make the cluster where there is none yet, and say how it is started.

    Args:
        folder: holds `data`.
        port: on the loopback address; there is no unix socket, whose path would be limited.
        password: of the role `halfrate`, given when the cluster is made.
        durable: False spares waiting for the disk, for data that nobody keeps.

    Raises:
        StackError: the cluster could not be made, or we are root and cannot become another user.
    """
    data = folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    if not (data / "PG_VERSION").exists():
        _make_cluster(folder, data, password, durable=durable)
    argv = [
        *_as_nobody(data),
        str(postgres_program("postgres")),
        "-D",
        str(data),
        *_options(port, durable=durable),
    ]
    return Part(
        name=NAME,
        argv=tuple(argv),
        folder=folder,
        environment={},
        ports=(port,),
        url=f"postgresql://{ROLE}@{LOOPBACK}:{port}/{DATABASE}",
        ready=lambda _: _answers(port, password),
        # Fast, then immediate: both end sessions; the second leaves recovery to the next start.
        stop=(StopStep(Signals.SIGINT, 10.0), StopStep(Signals.SIGQUIT, 5.0)),
        start_s=120.0,  # recovery after a crash may take a while
        user=None if _needs_capability(data) else _other_user(),
        before_start=lambda: _clear_after_crash(data),
    )


def _options(port: int, *, durable: bool) -> list[str]:
    settings = {
        "listen_addresses": LOOPBACK,
        "port": str(port),
        "unix_socket_directories": "",
        "max_connections": "100",
        "shared_buffers": "128MB",
        "password_encryption": "scram-sha-256",
        "timezone": "UTC",
        "log_timezone": "UTC",
        # Statements hold what clients sent; errors are logged without them.
        "log_min_error_statement": "panic",
        "log_error_verbosity": "terse",
    }
    if not durable:
        # Still safe from a kill of any process: what is committed is with the kernel.
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return [item for key, value in settings.items() for item in ("-c", f"{key}={value}")]


def _make_cluster(folder: Path, data: Path, password: str, *, durable: bool) -> None:
    # Made aside and renamed: an interrupted initdb leaves nothing that looks like a cluster.
    made = folder / "data.new"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=PGDATA_MODE)
    password_file = made / "password"
    cluster = made / "cluster"
    password_file.touch(mode=0o600)
    password_file.write_text(password + "\n")
    owner = _other_user()
    if owner is not None:
        for path in (made, password_file):
            os.chown(path, owner, owner)
    needs_capability = _needs_capability(made)
    command = [
        *_as_nobody(made),
        str(postgres_program("initdb")),
        f"--pgdata={cluster}",
        f"--username={ROLE}",
        f"--pwfile={password_file}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--no-instructions",
        *([] if durable else ["--no-sync"]),
    ]
    user = None if needs_capability else owner
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        shutil.rmtree(made, ignore_errors=True)
        raise StackError(f"Postgres could not make its data folder {data}:\n{said}") from error
    password_file.unlink()
    cluster.replace(data)
    made.rmdir()


def _answers(port: int, password: str) -> bool:
    """Whether it lets us in; the first time, this makes the database."""
    try:
        with psycopg.connect(
            database_url(port, password, "postgres"), connect_timeout=2, autocommit=True
        ) as connection:
            known = connection.execute(
                "SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)
            ).fetchone()
            if known is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    except psycopg.Error:
        return False
    return True


# --- Running as root -----------------------------------------------------------------------------


def _other_user() -> int | None:
    """The uid that Postgres runs as where ours is root's, else None."""
    return NOBODY if os.geteuid() == 0 else None


def _as_nobody(data: Path) -> list[str]:
    """What stands before a command that needs more than another uid: it keeps the one capability
    to pass folders that only root may enter, such as /root, whose permissions are not ours to
    change. Empty where changing the uid is enough.

    Raises:
        StackError: it would be needed, and `setpriv` is not installed.
    """
    if not _needs_capability(data):
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise StackError(
            f"Postgres cannot run as root, and another user cannot reach {data}. "
            "Choose a --home below folders that everybody may enter, run as another user, "
            "or install setpriv (util-linux)."
        )
    return [
        setpriv,
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
        # access(2), by which initdb looks for its programs, counts capabilities of other uids
        # than root's only so.
        "--securebits=+no_setuid_fixup",
    ]


def _needs_capability(data: Path) -> bool:
    if _other_user() is None:
        return False
    program = postgres_program("postgres")
    catalog = program.parent.parent / "share" / "postgresql" / "postgres.bki"
    readable = all(path.stat().st_mode & stat.S_IROTH for path in (program, catalog))
    passable = all(
        parent.stat().st_mode & stat.S_IXOTH
        for path in (data, program, catalog)
        for parent in path.resolve().parents
        # The folder of an unfinished cluster is handed over together with what it holds.
        if parent.stat().st_uid != NOBODY
    )
    return not (readable and passable)


# --- After a crash -------------------------------------------------------------------------------


def postmasters(data: Path) -> list[psutil.Process]:
    """Every process of the cluster in `data`. Its children overwrite their environment, but all of
    them work in this folder, and only they do."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.name().startswith("postgres") and Path(process.cwd()) == data.resolve():
                found.append(process)
    return found


def _clear_after_crash(data: Path) -> None:
    """End what a killed Postgres left and remove its pid file.

    Its sessions may outlive it, and then hold the shared memory that the next one refuses to start
    beside. And where the pid in the file has been given to another process of the same user,
    Postgres would take that one for a running server.
    """
    orphans = postmasters(data)
    for process in orphans:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(orphans, timeout=5)
    if not postmasters(data):
        (data / "postmaster.pid").unlink(missing_ok=True)
