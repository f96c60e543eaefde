"""Does a batch come whole through connections to the store that break in the middle of a reply?"""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import cycle
from urllib.parse import urlsplit

import pytest

from service.batch import BatchStatus
from service.db.session import Database
from service.settings import Settings
from service.storage import Storage
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from worker.resources import Resources, worker_name
from worker.settings import WorkerSettings

pytestmark = pytest.mark.chaos

NUMBER = 300
# Bytes that come back before the cut: none, part of a head, part of a body, and so on.
AFTER = (0, 20, 600, 3_000, 20_000, 200_000, 200_000)


class Cutter:
    """A way to a server; each connection is reset after so many bytes of replies."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._after = cycle(AFTER)
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                for way in ((client, server, None), (server, client, next(self._after))):
                    threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65_536):
                if budget is not None and passed + len(data) > budget:
                    sink.sendall(data[: budget - passed])
                    self.cuts += 1
                    # Reset, not closed: what a network or a killed process does.
                    sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                passed += len(data)
                sink.sendall(data)
        for end in (source, sink):
            # Wakes the thread of the other way; to shut it for writing would be an orderly end.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def cutting(port: int) -> Iterator[Cutter]:
    with closing(Cutter(port)) as cutter:
        server = threading.Thread(target=cutter.serve, daemon=True)
        server.start()
        yield cutter
    server.join(10)


def test_a_batch_ends_whole_although_the_store_is_cut_off_again_and_again(
    settings: Settings, database: Database, storage: Storage
) -> None:
    """No connection lasts; what a stage could not do is done again."""
    assert settings.s3_endpoint_url is not None
    port = urlsplit(settings.s3_endpoint_url).port
    assert port is not None
    name = worker_name(os.getpid())
    with cutting(port) as cutter:
        through = settings.model_copy(
            update={
                "s3_endpoint_url": f"http://127.0.0.1:{cutter.port}",
                "lease_s": 30.0,
                "flush_s": 0.2,
                "shard_s": 0.05,
            }
        )
        with (
            closing(Resources.open(through, WorkerSettings(), name=name)) as cut,
            closing(Resources.open(settings, WorkerSettings(), name=name)) as direct,
        ):
            pipeline = Pipeline.with_project(direct)
            batch_id = pipeline.submit(
                [embedding_line(f"{n}", f"text {n} " * 20) for n in range(NUMBER)]
            )
            worker = Pipeline(cut, pipeline.project_id)
            for _ in range(20):
                worker.skip_waits()
                worker.validate()
                worker.plan()
                worker.drain()
                worker.assemble()
                worker.clean()
                if not worker.open_stages(batch_id) and worker.batch(batch_id).completed == NUMBER:
                    break
            assert cutter.cuts > 2 * len(AFTER)
            batch = invariants.check(pipeline, batch_id)
            assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, NUMBER)
