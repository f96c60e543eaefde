"""What do faults strike at? Every part as a process of its own, watched as `halfrate up` does it.

Two CPU workers and two engine workers, so that one can take over from the other; a relay before
Postgres, Valkey, SeaweedFS and the API. In this database, and in no other, triggers wait where a
test holds a stage, and the clock can be stepped.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from service.db.keys import create_key, create_project
from service.db.migrate import upgrade
from service.db.models import Right, Worker
from service.db.session import Database
from service.settings import MIB
from service.stack.own import prepare_own
from service.stack.part import Part, PartState
from service.stack.parts import Secrets, addresses, prepare_embedded
from service.stack.ports import Ports
from service.stack.roster import POLL_S, Member, Prepare, Roster
from service.stack.supervisor import settings_of
from service.stack.sweep import sweep
from service.storage import Storage
from tests.e2e.chaos.proxy import Relay

MODEL = "stub-embed"
CATALOG = f"""
[[models]]
id = "{MODEL}"
kind = "embed"
source = "stub:"
price_input = 0.02
"""
LEASE_S = 3
RHYTHM = {
    "HALFRATE_LEASE_S": f"{LEASE_S}",
    "HALFRATE_RENEW_S": "0.5",
    "HALFRATE_FLUSH_S": "0.3",
    "HALFRATE_TICK_S": "0.3",
    "HALFRATE_SHARD_S": "0.1",
    "HALFRATE_CPU_SLOTS": "3",
    "HALFRATE_LOG_LEVEL": "INFO",
}
OWN = ("api", "cpu", "cpu2", "engine", "engine2", "beat")
REST_S = 120.0
URL_SETTINGS = ("HALFRATE_DATABASE_URL", "HALFRATE_REDIS_URL", "HALFRATE_S3_ENDPOINT_URL")

# A stage waits in the middle of its transaction for as long as the test holds the lock. The
# function that stands before Postgres's own is what every lease, window and stamp reads.
HOOKS = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.clock (step interval NOT NULL);
INSERT INTO chaos.clock VALUES ('0');
CREATE FUNCTION chaos.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    'SELECT pg_catalog.clock_timestamp() + step FROM chaos.clock';
CREATE FUNCTION chaos.wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_lock_shared(TG_ARGV[0]::bigint);
    PERFORM pg_advisory_unlock_shared(TG_ARGV[0]::bigint);
    RETURN NULL;
END $$;
CREATE TRIGGER wait AFTER INSERT ON public.request_lines
    FOR EACH STATEMENT EXECUTE FUNCTION chaos.wait('{validate}');
CREATE TRIGGER wait AFTER INSERT ON public.shards
    FOR EACH STATEMENT EXECUTE FUNCTION chaos.wait('{plan}');
CREATE TRIGGER wait AFTER INSERT ON public.parts
    FOR EACH STATEMENT EXECUTE FUNCTION chaos.wait('{write_back}');
ALTER DATABASE halfrate SET search_path = chaos, pg_catalog, public;
"""
LOCKS = {"validate": 71, "plan": 72, "write_back": 73}


class Stack:
    """The parts, by name, and ways to hurt them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.control = home / "control"
        self.relay = Relay()
        self._roster = Roster(home)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._watch_over, name="roster", daemon=True)
        self._paused: set[str] = set()

    def start(self) -> None:
        """All parts, ready."""
        self.control.mkdir(parents=True)
        catalog = self.home / "models.toml"
        catalog.write_text(CATALOG, encoding="utf-8")
        words = Secrets.kept_in(self.home / "secrets.json")
        ports = Ports(self.home / "ports.json")
        for prepare in prepare_embedded(self.home, ports, words, durable=False).values():
            self._roster.begin(prepare)
        self._roster.await_ready()
        direct = addresses(self._roster, words)
        self.database_url = direct["HALFRATE_DATABASE_URL"]
        upgrade(self.database_url)
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(HOOKS.format(**LOCKS))
        self.database = Database(self.database_url, pool=4, application="chaos")
        # Names that begin otherwise are this machine's own: PATH, proxies, locale.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HALFRATE_")}  # noqa: TID251
        self.environment = {
            **inherited,
            **direct,
            **{name: self._relayed(direct[name]) for name in URL_SETTINGS},
            **RHYTHM,
            "HALFRATE_HOME": str(self.home),
            "HALFRATE_MODELS": str(self.home / "models"),
            "HALFRATE_CATALOG": str(catalog),
        }
        self.storage = Storage.from_settings(settings_of({**self.environment, **direct}))
        self.storage.ensure_bucket()
        for prepare in self._own(ports):
            self._roster.begin(prepare)
        self._roster.await_ready()
        with self.database.transaction() as transaction:
            project = create_project(transaction, "chaos")
            _, key = create_key(transaction, project.id, "chaos", Right.ADMIN)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.relay.to(self.member('api').part.ports[0])}/v1",
            headers={"authorization": f"Bearer {key}"},
            timeout=20,
        )
        self._watch.start()

    def close(self) -> None:
        """End all."""
        self._stop.set()
        if self._watch.is_alive():
            self._watch.join()
        with suppress(AttributeError):
            self.http.close()
            self.storage.close()
            self.database.close()
        own = {m.part.name for m in self._roster.members} - {"postgres", "valkey", "seaweedfs"}
        self._roster.stop(own, lambda: True)
        self._roster.stop()
        self.relay.close()
        sweep(self.home)

    # --- Parts ---

    def _relayed(self, url: str) -> str:
        port = urlsplit(url).port
        assert port is not None
        return url.replace(f":{port}", f":{self.relay.to(port)}")

    def _own(self, ports: Ports) -> list[Prepare]:
        api, cpu, beat, engine = prepare_own(
            self.home,
            self.environment,
            port=lambda: ports.take("api"),
            models=[MODEL],
            database=self.database,
        )

        def named(prepare: Prepare, name: str) -> Prepare:
            return lambda: replace(prepare(), name=name)

        def hindered(name: str) -> Prepare:
            def prepare() -> Part:
                celery = (sys.executable, "-m", "celery", "-A", "tests.e2e.chaos.hindered")
                quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
                threads = ("worker", "-Q", f"engine.{MODEL}", "-P", "threads", "-c", "4")
                part = engine()
                return replace(
                    part,
                    name=name,
                    argv=(*celery, *threads, *quiet, "-n", f"{name}@%h"),
                    environment={**part.environment, "HALFRATE_SERVE": MODEL},
                    ready=self._is_registered,
                )

            return prepare

        workers = [named(cpu, "cpu"), named(cpu, "cpu2"), hindered("engine"), hindered("engine2")]
        return [api, *workers, beat]

    def _is_registered(self, pid: int) -> bool:
        name = f"{socket.gethostname()}:{pid}"
        try:
            with self.database.transaction() as transaction:
                return transaction.scalar(select(Worker.name).where(Worker.name == name)) == name
        except SQLAlchemyError:
            return False

    def member(self, name: str) -> Member:
        """The part of that name."""
        return next(each for each in self._roster.members if each.part.name == name)

    def named(self, pid: int) -> str:
        """The part that has this pid."""
        return next(each.part.name for each in self._roster.members if each.pid == pid)

    def _watch_over(self) -> None:
        while not self._stop.wait(POLL_S):
            with self._lock:
                self._roster.tick()

    def at_rest(self) -> None:
        """Wait until every part runs; none is to be started more slowly for what was done to it."""

        def rests() -> bool:
            with self._lock:
                for member in self._roster.members:
                    member.falls = 0
                return all(each.state is PartState.RUNNING for each in self._roster.members)

        until(rests, REST_S, "every part runs")

    # --- Faults ---

    def kill(self, name: str, *, back_after_s: float = 0.0) -> None:
        """SIGKILL to the part and whatever it started; it comes back."""
        with self._lock:
            member = self.member(name)
            if member.child is None:
                return
            member.child.kill()
            self._roster.tick()
            member.start_at = max(member.start_at, time.monotonic() + back_after_s)

    def restart(self, name: str) -> None:
        """An orderly end; it comes back."""
        with self._lock:
            child = self.member(name).child
        if child is not None:
            child.signal(self.member(name).part.stop[0].signal)
            until(child.ended, 20, f"{name} ended")

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Meanwhile the part and its children get no time at all."""
        pid = self.member(name).pid
        assert pid is not None
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in family:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Meanwhile the store can lengthen no file."""
        pid = self.member("seaweedfs").pid
        assert pid is not None
        store = psutil.Process(pid)
        _, hard = store.rlimit(psutil.RLIMIT_FSIZE)
        store.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
        try:
            yield
        finally:
            with suppress(psutil.Error):
                store.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))

    # --- What can be read ---

    def answered(self, word: str) -> Counter[str]:
        """How often each text that holds the word was answered by an engine."""
        log = self.control / "answered"
        texts = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return Counter(text for text in texts if word in text)

    def footprint(self) -> dict[str, tuple[int, int]]:
        """What each of our own parts holds, children included: MiB of memory, and open files."""
        found = {}
        for name in OWN:
            parent = psutil.Process(self.member(name).pid)
            family = [parent, *parent.children(recursive=True)]
            memory = files = 0
            for each in family:
                with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    memory += each.memory_info().rss
                    files += each.num_fds()
            found[name] = memory // MIB, files
        return found

    def query(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Rows, straight from Postgres; none where it is away."""
        try:
            with closing(psycopg.connect(self.database_url, autocommit=True)) as connection:
                return connection.execute(statement, values).fetchall()
        except psycopg.OperationalError:
            return []

    def execute(self, statement: str, *values: object) -> None:
        """A statement, once Postgres is there."""

        def done() -> bool:
            try:
                with psycopg.connect(self.database_url, autocommit=True) as connection:
                    connection.execute(statement, values)
            except psycopg.OperationalError:
                return False
            return True

        until(done, 60, statement)


def until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for it. Raises AssertionError when it took too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
