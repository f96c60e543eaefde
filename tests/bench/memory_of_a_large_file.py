"""How much memory do the API and the CPU worker need for a large file?

Starts a stack of its own in a temporary home with stub models, uploads a generated file through
the official client, lets it be validated and planned, and prints the largest resident size of each
process above its size at rest.

    .venv/bin/python tests/bench/memory_of_a_large_file.py [--megabytes 300]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil
from openai import OpenAI

MIB = 1024 * 1024
HALFRATE = str(Path(sys.executable).parent / "halfrate")
CATALOG = """
[[models]]
id = "stub-embed"
kind = "embed"
source = "stub:"
price_input = 0.02
"""
SENTENCE = "All of this is text that somebody wants to find again some day. "


def main() -> None:
    """Print a line a process, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfrate-bench-") as folder:
        home = Path(folder) / "home"
        data = Path(folder) / "large.jsonl"
        lines = write_lines(data, options.megabytes * MIB)
        with stack(Path(folder), home) as environment:
            client = OpenAI(
                base_url=environment["OPENAI_BASE_URL"],
                api_key=environment["OPENAI_API_KEY"],
                timeout=1800,
                max_retries=0,
            )
            with Sizes(pids(home)) as sizes:
                figures = run(client, data)
            print(f"file: {data.stat().st_size / MIB:.0f} MiB, {lines} lines")
            for name, grown in sizes.grown().items():
                print(f"{name}: {grown:+.0f} MiB at most above rest")
            print(
                json.dumps({"lines": lines, **figures, "grown_mib": sizes.grown()}, sort_keys=True)
            )


def write_lines(path: Path, size: int) -> int:
    """A file of about `size` bytes; answers its number of lines."""
    lines = 0
    with path.open("wb") as out:
        while out.tell() < size:
            _write_line(out, lines)
            lines += 1
    return lines


def _write_line(out: BinaryIO, number: int) -> None:
    body = {"model": "stub-embed", "input": SENTENCE * (1 + number % 40)}
    line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body}
    out.write(json.dumps(line).encode() + b"\n")


@contextmanager
def stack(folder: Path, home: Path) -> Iterator[dict[str, str]]:
    """A stack with stub models; gives the client's environment."""
    catalog = folder / "models.toml"
    catalog.write_text(CATALOG, encoding="utf-8")
    # Handed on to the stack, with one setting changed.
    environment = {**os.environ, "HALFRATE_CATALOG": str(catalog)}  # noqa: TID251
    command = [HALFRATE, "up", "--home", str(home), "--detach"]
    subprocess.run(command, check=True, env=environment)
    try:
        lines = (home / "client.env").read_text(encoding="utf-8").splitlines()
        yield dict(line.split("=", 1) for line in lines if "=" in line)
    finally:
        subprocess.run([HALFRATE, "down", "--home", str(home)], check=True, env=environment)


def pids(home: Path) -> dict[str, int]:
    """Process ids of the parts, by name."""
    shown = subprocess.run(
        [HALFRATE, "status", "--home", str(home), "--json"], check=True, capture_output=True
    )
    return {part["name"]: part["pid"] for part in json.loads(shown.stdout)["parts"]}


def run(client: OpenAI, data: Path) -> dict[str, float]:
    """Upload, submit, wait until planned; answers seconds."""
    started = time.monotonic()
    with data.open("rb") as content:
        file = client.files.create(file=(data.name, content), purpose="batch")
    uploaded = time.monotonic()
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.2)
    validated = time.monotonic()
    # The first finished line shows that the plan is made.
    while (now := client.batches.retrieve(batch.id)).status == "in_progress":
        if now.request_counts is not None and now.request_counts.completed:
            break
        time.sleep(0.2)
    planned = time.monotonic()
    if now.status not in ("in_progress", "finalizing", "completed"):
        raise SystemExit(f"the batch is {now.status}: {now.errors}")
    client.batches.cancel(batch.id)
    return {
        "upload_s": round(uploaded - started, 1),
        "validate_s": round(validated - uploaded, 1),
        "plan_s": round(planned - validated, 1),
    }


class Sizes:
    """Watches resident sizes of the API and of the CPU worker with its children."""

    def __init__(self, parts: dict[str, int]) -> None:
        self._roots = {name: psutil.Process(parts[name]) for name in ("api", "cpu")}
        self._rest = self._read()
        self._most = dict(self._rest)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Sizes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def grown(self) -> dict[str, float]:
        """MiB above rest at most: each process, and the CPU worker as a whole."""
        return {
            name: round((most - self._rest.get(name, 0)) / MIB, 1)
            for name, most in sorted(self._most.items())
            if name in self._rest
        }

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for name, size in self._read().items():
                self._most[name] = max(self._most.get(name, 0), size)

    def _read(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, root in self._roots.items():
            family = [root, *root.children(recursive=True)]
            each = [process.memory_info().rss for process in family]
            sizes[name] = sum(each)
        return sizes


if __name__ == "__main__":
    main()
