"""Which of our own processes make up the stack? The API, a CPU worker, the beat, engine workers."""

import http.client
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from signal import Signals
from urllib.parse import urlsplit

import psutil
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from service.db.models import Worker
from service.db.session import Database, now
from service.stack.choice import engine_name
from service.stack.part import BULK_NICE, Part, StopStep
from service.stack.ports import LOOPBACK
from service.stack.roster import Prepare

# Celery's warm shutdown: what is in flight is aborted within 10 s, what is finished is kept.
WORKER_STOP = (StopStep(Signals.SIGTERM, 12.0), StopStep(Signals.SIGQUIT, 2.0))
API_STOP = (StopStep(Signals.SIGTERM, 12.0),)
# A model may have to be read from a slow disk.
ENGINE_START_S = 600.0
EVERYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - recognised here, not bound


def prepare_own(
    home: Path,
    environment: Mapping[str, str],
    *,
    port: Callable[[], int],
    models: Sequence[str],
    database: Database,
) -> list[Prepare]:
    """How each of our own parts is prepared.

    Args:
        home: their working directory.
        environment: holds every setting, HALFRATE_DATABASE_URL and so on.
        port: where the API is to listen; asked again when it was taken meanwhile.
        models: ids; each gets an engine worker of its own.
        database: asked which engine workers have registered.
    """
    variables = {**environment, **python_variables()}
    broker = urlsplit(environment["HALFRATE_REDIS_URL"]).port

    def worker(name: str) -> Prepare:
        return lambda: Part(
            name=name,
            argv=_command("run", name),
            folder=home,
            environment=variables,
            ports=(),
            url=None,
            ready=lambda pid: _is_connected(pid, broker),
            stop=WORKER_STOP,
            nice=BULK_NICE,
        )

    return [
        lambda: _api(home, variables, port()),
        worker("cpu"),
        worker("beat"),
        *(_engine(home, variables, model, database) for model in models),
    ]


def python_variables() -> dict[str, str]:
    """What a Python process of ours needs to find this code, wherever it is started."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        # The home is their working directory, and it has folders named as packages are.
        "PYTHONSAFEPATH": "1",
    }
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").exists():  # run from a checkout, maybe without installing
        variables["PYTHONPATH"] = str(source)
    return variables


def api_url(environment: Mapping[str, str], port: int) -> str:
    """Where a client on this machine finds the API."""
    host = environment.get("HALFRATE_HOST", LOOPBACK)
    return f"http://{LOOPBACK if host in EVERYWHERE else host}:{port}"


def _api(home: Path, environment: Mapping[str, str], port: int) -> Part:
    url = api_url(environment, port)
    return Part(
        name="api",
        argv=_command("run", "api"),
        folder=home,
        environment={**environment, "HALFRATE_PORT": str(port)},
        ports=(port,),
        url=url,
        ready=lambda _: _says_ready(url),
        stop=API_STOP,
    )


def _engine(home: Path, environment: Mapping[str, str], model: str, database: Database) -> Prepare:
    def prepare() -> Part:
        registration = Registration(database, model)
        return Part(
            name=engine_name(model),
            argv=_command("run", "engine", "--model", model),
            folder=home,
            # Engines share this machine's cores: threads that spin while they wait would take
            # them from one another (demo on 2 cores: tagging 106 s spinning, 67 s passive).
            environment={"OMP_WAIT_POLICY": "passive", **environment},
            ports=(),
            url=None,
            ready=lambda _: registration.seen(),
            stop=WORKER_STOP,
            start_s=ENGINE_START_S,
            nice=BULK_NICE,
            before_start=registration.note_time,
        )

    return prepare


class Registration:
    """Has an engine worker with this model loaded reported since we started one?"""

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._model = model
        self._since: datetime | None = None

    def note_time(self) -> None:
        """Reports up to now are those of earlier workers."""
        # Without a database there are no reports either; it comes back, and so does this part.
        try:
            with self._database.transaction() as session:
                self._since = now(session)
        except SQLAlchemyError:
            self._since = None

    def seen(self) -> bool:
        """Whether there is a report since then."""
        try:
            with self._database.transaction() as session:
                latest = session.scalar(
                    select(Worker.heartbeat_at)
                    .where(Worker.models.contains([self._model]))
                    .order_by(Worker.heartbeat_at.desc())
                    .limit(1)
                )
        except SQLAlchemyError:
            return False
        return latest is not None and (self._since is None or latest > self._since)


def _command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "service.cli.main", *arguments)


def _says_ready(url: str) -> bool:
    address = urlsplit(url).netloc
    with closing(http.client.HTTPConnection(address, timeout=3)) as connection:
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


def _is_connected(pid: int, port: int | None) -> bool:
    """Whether the process has reached the broker; it cannot be asked itself."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    # The remote address of a socket that listens is ().
    remote_ports = [connection.raddr[1:] for connection in connections]
    return port is None or (port,) in remote_ports
