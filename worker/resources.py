"""What does every worker process hold? Connections, the catalog, its settings and its name."""

import os
import socket
from dataclasses import dataclass
from functools import cache
from typing import Self

from service.catalog import Catalog
from service.db.hung import WORKERS
from service.db.session import Database
from service.settings import Settings
from service.storage import Storage
from service.wake import STALE_TICKS, Waker
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Resources:
    """Made once a process, after any fork; handed down from the tasks."""

    settings: Settings
    worker_settings: WorkerSettings
    catalog: Catalog
    database: Database
    storage: Storage
    waker: Waker
    # `host:pid` of the worker's main process: prefork children share their parent's name.
    name: str

    @classmethod
    def open(cls, settings: Settings, worker_settings: WorkerSettings, *, name: str) -> Self:
        """Connect lazily: nothing is reached before it is used."""
        return cls(
            settings=settings,
            worker_settings=worker_settings,
            catalog=Catalog.load(settings.catalog),
            database=Database(
                settings.database_url.get_secret_value(),
                pool=settings.database_pool,
                application=WORKERS + name,
            ),
            storage=Storage.from_settings(settings),
            waker=Waker(
                settings.redis_url.get_secret_value(), expires_s=settings.tick_s * STALE_TICKS
            ),
            name=name,
        )

    def close(self) -> None:
        """Give every connection back."""
        self.database.close()
        self.storage.close()
        self.waker.close()


def worker_name(pid: int) -> str:
    """How a worker process signs its claims."""
    return f"{socket.gethostname()}:{pid}"


@cache
def of_cpu_process() -> Resources:
    """This prefork child's own; not to be called before the fork."""
    return Resources.open(Settings(), WorkerSettings(), name=worker_name(os.getppid()))


@cache
def of_engine_process() -> Resources:
    """This engine worker's own, shared by its threads."""
    return Resources.open(Settings(), WorkerSettings(), name=worker_name(os.getpid()))
