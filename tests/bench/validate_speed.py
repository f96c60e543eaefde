"""How fast is an input file validated, and in how much memory?

Starts the embedded programs in a temporary folder, generates a file, puts it into the store and
validates it as a CPU worker does, in this process. Prints lines/s, MB/s and how far the resident
size rose above rest, as one JSON object at the end.

    .venv/bin/python tests/bench/validate_speed.py [--lines 50000] [--megabytes 200] [--profile]
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from uuid import UUID

import psutil
from sqlalchemy import select

from service.batch import BatchStatus, StageName
from service.db import batches, session
from service.db.migrate import upgrade
from service.db.models import Batch, File, Project
from service.ids import new_id
from service.settings import Settings
from service.stack.parts import EmbeddedUrls, embedded
from worker import stages, validate
from worker.resources import Resources, worker_name
from worker.settings import WorkerSettings

MB = 1_000_000
MIB = 1024 * 1024
CATALOG = """
[[models]]
id = "stub-chat"
kind = "generate"
source = "stub:"
price_input = 0.10
"""
SENTENCE = 'All of this is "text" that somebody wants to have read — every word, ça va? 你好。\n'


def main() -> None:
    """Print a line for people, then one JSON object."""
    parser = argparse.ArgumentParser(description="See the first lines of this file.")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfrate-bench-") as name:
        folder = Path(name)
        with (
            embedded(folder / "stack") as urls,
            closing(open_resources(urls, folder)) as resources,
        ):
            # A small one first, so that all is loaded.
            check(resources, submit_elsewhere(urls, folder, 100, 100_000))
            large = submit_elsewhere(urls, folder, options.lines, options.megabytes * MB)
            figures = measure(resources, large, options.lines, profiled=options.profile)
    print(
        f"{figures['lines']:,} lines, {figures['megabytes']} MB: {figures['seconds']} s, "
        f"{figures['lines_per_s']:,} lines/s, {figures['mb_per_s']} MB/s, "
        f"{figures['grown_mib']:+} MiB at most above rest"
    )
    print(json.dumps(figures, sort_keys=True))


def open_resources(urls: EmbeddedUrls, folder: Path) -> Resources:
    """What a CPU worker holds."""
    upgrade(urls.database_url)
    catalog = folder / "models.toml"
    catalog.write_text(CATALOG, encoding="utf-8")
    settings = Settings(
        home=folder / "home",
        catalog=catalog,
        database_url=urls.database_url,
        redis_url=urls.redis_url,
        s3_endpoint_url=urls.s3_endpoint_url,
        s3_access_key_id=urls.s3_access_key_id,
        s3_secret_access_key=urls.s3_secret_access_key,
    )
    resources = Resources.open(settings, WorkerSettings(), name=worker_name(os.getpid()))
    resources.storage.ensure_bucket()
    return resources


def measure(
    resources: Resources, batch_id: UUID, lines: int, *, profiled: bool
) -> dict[str, int | float]:
    """Validate that batch's file."""
    profile = cProfile.Profile()
    with Size() as grown:
        started = time.perf_counter()
        if profiled:
            profile.enable()
        check(resources, batch_id)
        profile.disable()
        seconds = time.perf_counter() - started
    if profiled:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(20)
    with resources.database.transaction() as transaction:
        batch, file = transaction.execute(
            select(Batch, File)
            .join(File, File.id == Batch.input_file_id)
            .where(Batch.id == batch_id)
        ).one()
    if batch.status is not BatchStatus.IN_PROGRESS or batch.total != lines:
        raise SystemExit(f"the batch is {batch.status} with {batch.total} lines: {batch.errors}")
    return {
        "lines": lines,
        "megabytes": round(file.bytes / MB),
        "seconds": round(seconds, 2),
        "lines_per_s": round(lines / seconds),
        "mb_per_s": round(file.bytes / MB / seconds, 1),
        "grown_mib": round(grown.most / MIB, 1),
    }


def check(resources: Resources, batch_id: UUID) -> None:
    """The stage, as a worker's process runs it."""
    stages.run_ready(resources, StageName.VALIDATE, validate.validate)
    with resources.database.transaction() as transaction:
        status = transaction.scalar(select(Batch.status).where(Batch.id == batch_id))
    if status is BatchStatus.VALIDATING:
        raise SystemExit("the stage was not done")


def submit_elsewhere(urls: EmbeddedUrls, folder: Path, lines: int, size: int) -> UUID:
    """In a process of its own: what an upload leaves behind would hide what validating needs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_submit, urls, folder, lines, size).result()


def _submit(urls: EmbeddedUrls, folder: Path, lines: int, size: int) -> UUID:
    with closing(open_resources(urls, folder)) as resources:
        return submit(resources, lines, size)


def submit(resources: Resources, lines: int, size: int) -> UUID:
    """A file of so many lines and about so many bytes, and its batch."""
    project_id, file_id = new_id(), new_id()
    key = f"files/{project_id.hex}/{file_id.hex}"
    with resources.storage.writer(key) as writer:
        for some in generated(lines, size):
            writer.write(some)
        written = writer.size
    with resources.database.transaction() as transaction:
        now = session.now(transaction)
        transaction.add(Project(id=project_id, name=project_id.hex, created_at=now))
        transaction.flush()
        transaction.add(
            File(
                id=file_id,
                project_id=project_id,
                purpose="batch",
                filename="input.jsonl",
                bytes=written,
                storage_key=key,
                created_at=now,
            )
        )
        transaction.flush()
        return batches.create(
            transaction,
            project_id=project_id,
            endpoint="/v1/chat/completions",
            input_file_id=file_id,
            completion_window="24h",
            window=timedelta(hours=24),
            metadata=None,
            output_expires_after_s=None,
            now=now,
        ).id


def generated(lines: int, size: int) -> Iterator[bytes]:
    """The file's bytes, a line at a time: chats whose lengths vary around the mean."""
    empty = len(line(0, ""))
    sentence = len(json.dumps(SENTENCE, ensure_ascii=False).encode()) - 2
    room = max(0, size // lines - empty)
    for number in range(lines):
        # From nothing to twice the mean.
        asked = room * 2 * (number % 100) // 99
        yield line(number, SENTENCE * (asked // sentence) + "x" * (asked % sentence))


def line(number: int, text: str) -> bytes:
    """One request."""
    body = {
        "model": "stub-chat",
        "messages": [
            {"role": "system", "content": "Answer with one word."},
            {"role": "user", "content": text},
        ],
        "max_tokens": 16,
        "temperature": 0,
    }
    request = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(request, ensure_ascii=False).encode() + b"\n"


class Size:
    """How far this process's resident size rises while the block runs."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._rest = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = 0

    def __enter__(self) -> "Size":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, self._process.memory_info().rss - self._rest)


if __name__ == "__main__":
    main()
