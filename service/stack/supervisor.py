"""What does `halfrate up` do, from an empty folder to a stack that is watched?"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from service.catalog import StubSource
from service.db.migrate import upgrade
from service.db.session import Database
from service.settings import Files, Settings
from service.stack.choice import brought_parts, part_names, served_models
from service.stack.client import client_key, write_client_env
from service.stack.home import Home, locked
from service.stack.interrupt import Interrupt
from service.stack.own import api_url, prepare_own, python_variables
from service.stack.part import StackError
from service.stack.parts import Secrets, addresses, prepare_embedded
from service.stack.ports import Ports, is_free
from service.stack.process import MARKER, empty_folder
from service.stack.record import (
    StackRecord,
    outside_files,
    part_record,
    read_record,
    recorded_processes,
    write_record,
)
from service.stack.roster import POLL_S, Roster
from service.stack.sweep import sweep
from service.storage import Storage, StorageError

# Workers before what they write to; the database last.
STORES_STOP = ("seaweedfs", "valkey", "postgres")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `halfrate up` was asked for."""

    port: int | None = None  # of the API; None: the recorded one, or any
    serve: tuple[str, ...] = ()  # ids of models; empty: the whole catalog


def up(home: Home, options: UpOptions, say: Say) -> None:
    """Start the stack of this home and keep watch until a signal ends it.

    Raises:
        HomeTaken: it runs already.
        StackError: something did not start; everything is stopped again then.
    """
    with locked(home), Interrupt.installed() as interrupt:
        stack = Stack(home, options, say, interrupt)
        try:
            stack.start()
            stack.watch()
        finally:
            stack.stop()


class Stack:
    """One home's stack, as seen by its supervisor."""

    def __init__(self, home: Home, options: UpOptions, say: Say, interrupt: Interrupt) -> None:
        self._home = home
        self._options = options
        self._say = say
        self._interrupt = interrupt
        self._files = Files()
        self._models = served_models(self._files, options.serve)
        self._names = part_names(self._models)
        self._ports = Ports(home.ports)
        self._roster = Roster(home.root, say=say, changed=self._write_record)
        self._environment = self._inherited()
        self._database: Database | None = None
        self._ready = False

    def start(self) -> None:
        """Everything up to the moment that a client may come."""
        self._clear()
        self._check_port()
        self._pull_models()
        self._start_embedded()
        settings = self._settings()
        database = self._migrated(settings)
        self._start_own(database)
        self._announce(database)

    def watch(self) -> None:
        """Start again who falls, until a signal comes."""
        while not self._interrupt.stop_asked():
            self._roster.tick()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End every part, workers first, the database last."""
        self._ready = False
        names = {member.part.name for member in self._roster.members}
        if names:
            self._say("Stopping …")
        hurried = self._interrupt.hurry_asked
        self._roster.stop(names - {"api", *STORES_STOP}, hurried)
        for name in ("api", *STORES_STOP):
            self._roster.stop([name], hurried)
        if self._database is not None:
            self._database.close()
        self._write_record()
        empty_folder(self._home.temporary)

    # --- The steps of starting ---

    def _clear(self) -> None:
        record = read_record(self._home)
        ended = sweep(self._home.root, recorded_processes(record), outside_files(record))
        if ended:
            self._say(f"Ended {ended} processes that an earlier stack of this home left behind.")
        empty_folder(self._home.temporary)
        self._write_record()

    def _check_port(self) -> None:
        asked = self._options.port
        if asked is not None and not is_free(asked):
            raise StackError(f"Port {asked} is taken by another program.")

    def _pull_models(self) -> None:
        for model in self._models:
            if isinstance(model.origin, StubSource) or model.folder(self._files.models).exists():
                continue
            self._say(f"Fetching {model.id} …")
            self._run(sys.executable, "-m", "worker.models", "pull", model.id)

    def _start_embedded(self) -> None:
        words = Secrets.kept_in(self._home.secrets)
        prepared = prepare_embedded(self._home.root, self._ports, words)
        brought = brought_parts()
        for name, prepare in prepared.items():
            if name not in brought:
                self._roster.begin(prepare)
        if self._roster.members:
            self._say(f"Starting {', '.join(name for name in prepared if name not in brought)} …")
        self._roster.await_ready(self._interrupt.stop_asked)
        self._environment |= addresses(self._roster, words)

    def _migrated(self, settings: Settings) -> Database:
        url = settings.database_url.get_secret_value()
        try:
            upgrade(url)
        except (SQLAlchemyError, RuntimeError) as error:
            raise StackError(f"The database could not be migrated: {error}") from error
        self._database = Database(url, pool=2, application="halfrate up")
        try:
            Storage.from_settings(settings).ensure_bucket()
        except StorageError as error:
            raise StackError(f"The bucket could not be made: {error}") from error
        return self._database

    def _start_own(self, database: Database) -> None:
        self._say("Starting the API and the workers …")
        for prepare in prepare_own(
            self._home.root,
            self._environment,
            port=self._api_port,
            models=[model.id for model in self._models],
            database=database,
        ):
            self._roster.begin(prepare)
        self._roster.await_ready(self._interrupt.stop_asked)

    def _announce(self, database: Database) -> None:
        key = client_key(self._home, database)
        write_client_env(self._home, self._url(), key)
        self._ready = True
        self._write_record()
        models = ", ".join(model.id for model in self._models) or "no model"
        self._say(
            f"halfrate is up at {self._url()} and serves {models}.\n"
            f"For an OpenAI client: set -a; . {self._home.client_env}; set +a"
        )

    # --- What the steps use ---

    def _api_port(self) -> int:
        asked = self._options.port
        if asked is None:
            return self._ports.take("api")
        self._check_port()
        self._ports.keep("api", asked)
        return asked

    def _url(self) -> str:
        return api_url(self._environment, self._roster.part("api").ports[0])

    def _inherited(self) -> dict[str, str]:
        # What a part needs beyond our settings is in there too: PATH, proxies, CUDA's variables.
        environment = dict(os.environ)  # noqa: TID251 - handed on to the parts
        environment.pop(MARKER, None)
        environment.pop("HALFRATE_SERVE", None)
        # Parts start in the home; a relative path would mean another place there.
        return environment | {
            "HALFRATE_HOME": str(self._home.root),
            "HALFRATE_MODELS": str(self._files.models.expanduser().resolve()),
            "HALFRATE_CATALOG": str(self._files.catalog.expanduser().resolve()),
        }

    def _settings(self) -> Settings:
        return settings_of(self._environment)

    def _run(self, *command: str) -> None:
        """Run a helper program to its end, with its output on the console."""
        variables = self._environment | python_variables() | {MARKER: str(self._home.root)}
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None:
            if self._interrupt.stop_asked():
                process.terminate()
                process.wait()
                raise StackError("Stopped while starting.")
            time.sleep(POLL_S)
        if process.returncode:
            raise StackError(f"`{' '.join(command[1:])}` ended with {process.returncode}.")

    def _write_record(self) -> None:
        ours = {
            name: value for name, value in self._environment.items() if name.startswith("HALFRATE_")
        }
        record = StackRecord(
            supervisor=os.getpid(),
            ready=self._ready,
            url=self._url() if self._ready else None,
            names=tuple(self._names),
            environment=ours,
            parts=tuple(part_record(member) for member in self._roster.members),
        )
        try:
            write_record(self._home, record)
        except OSError as error:
            # A full disk is no reason to stop what runs.
            self._say(f"{self._home.record} could not be written: {error.strerror}")


def settings_of(environment: dict[str, str]) -> Settings:
    """The settings that a process with this environment would read."""
    prefix = "HALFRATE_"
    return Settings.model_validate(
        {
            name.removeprefix(prefix).lower(): value
            for name, value in environment.items()
            if name.startswith(prefix)
        }
    )
