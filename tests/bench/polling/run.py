"""How quickly is a batch shown while many clients poll and some upload?

Starts a stack of its own in a temporary home with a stub model, and in it some batches at once over
several projects. First the crowd: each client polls one of them at its own moment of each interval,
whatever the last answer took (open loop, so a slow server is not spared), while others upload
without pause. Then the limit: a few clients that ask again as soon as they are answered (closed
loop). All over loopback, for a bounded time.

    .venv/bin/python -m tests.bench.polling.run [--clients 500] [--every 10] [--uploaders 16]
        [--batches 50] [--projects 5] [--lines 100] [--seconds 30] [--limit-seconds 10]
        [--megabytes 4]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import httpx

from tests.bench.polling import cores
from tests.bench.polling.clients import (
    Answer,
    Target,
    apart,
    clock,
    poll_closely,
    poll_openly,
    upload,
)

MIB = 1024 * 1024
HALFRATE = str(Path(sys.executable).parent / "halfrate")
CATALOG = """
[[models]]
id = "stub-embed"
kind = "embed"
source = "stub:"
price_input = 0.02
"""
LINE = {"method": "POST", "url": "/v1/embeddings"}
CLOSED_CLIENTS = 10
START_S = 2.0
"""While the clients' processes start."""


def main() -> None:
    """Print a line a phase, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--uploaders", type=int, default=16)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--projects", type=int, default=5)
    parser.add_argument("--lines", type=int, default=100, help="of a batch")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--limit-seconds", type=float, default=10)
    parser.add_argument("--megabytes", type=int, default=4)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="halfrate-bench-") as folder,
        stack(Path(folder), options.projects) as at,
    ):
        print(json.dumps(measure(at, options), sort_keys=True))


@dataclass(frozen=True)
class At:
    """Where the API is, a key of each project, and the processes of the stack by name."""

    base_url: str
    keys: list[str]
    pids: dict[str, int]


@contextmanager
def stack(folder: Path, projects: int) -> Iterator[At]:
    """A stack with a stub model and so many projects."""
    home, catalog = folder / "home", folder / "models.toml"
    catalog.write_text(CATALOG, encoding="utf-8")
    # Handed on to the stack, with one setting changed.
    environment = {**os.environ, "HALFRATE_CATALOG": str(catalog)}  # noqa: TID251

    def halfrate(*words: str) -> str:
        command = [HALFRATE, *words, "--home", str(home)]
        return subprocess.run(
            command, check=True, env=environment, stdout=subprocess.PIPE, text=True
        ).stdout

    print(halfrate("up", "--detach"), end="")
    try:
        lines = (home / "client.env").read_text(encoding="utf-8").splitlines()
        client = dict(line.split("=", 1) for line in lines if "=" in line)
        keys = [halfrate("key", "create", "--project", f"p{n}").strip() for n in range(projects)]
        parts = json.loads(halfrate("status", "--json"))["parts"]
        pids = {part["name"]: part["pid"] for part in parts if part["pid"]}
        yield At(client["OPENAI_BASE_URL"], keys, pids)
    finally:
        halfrate("down")


def measure(at: At, options: argparse.Namespace) -> dict[str, object]:
    """Both phases; milliseconds, requests a second, MiB a second and shares of a core."""
    with httpx.Client(base_url=at.base_url + "/", timeout=60) as http:
        files = [put_up(http, key, options.lines) for key in at.keys]
        owners = [number % len(at.keys) for number in range(options.batches)]
        # All at once, just before the crowd: they are checked, planned and run beside it.
        targets = [submit(http, at, at.keys[owner], files[owner]) for owner in owners]
        crowd, uploaded, had = crowded(at, targets, options)
        took, late = [each.took for each in crowd], [each.late for each in crowd]
        speed = uploaded / MIB / options.seconds
        print(
            f"{options.clients} clients every {options.every:g} s beside {options.uploaders}"
            f" uploaders ({speed:.0f} MiB/s): {shown(took)}; sent late by: {shown(late)}"
        )
        print("cores, had + waited for: " + told(had))
        took_s = ended(http, targets)
        print(
            f"{options.batches} batches of {options.lines} lines over {options.projects} projects:"
            f" the last one had ended after {took_s} s"
        )
    limit = closed(targets[0], options.limit_seconds)
    rate = len(limit) / options.limit_seconds
    print(f"{CLOSED_CLIENTS} clients without pause: {rate:.0f} requests/s, {shown(limit)}")
    return {
        "batches_ended_s": took_s,
        "cores": {name: share.had for name, share in had.items()},
        "crowd_polls": len(crowd),
        **{f"crowd_{name}_ms": value for name, value in quantiles(took).items()},
        **{f"crowd_late_{name}_ms": value for name, value in quantiles(late).items()},
        "uploaded_mib_per_s": round(speed, 1),
        "limit_requests_per_s": round(rate, 1),
        **{f"limit_{name}_ms": value for name, value in quantiles(limit).items()},
    }


def put_up(http: httpx.Client, key: str, lines: int) -> str:
    """An input file of so many lines; its id."""
    body = {"model": "stub-embed", "input": "a text"}
    data = "\n".join(json.dumps({**LINE, "custom_id": str(n), "body": body}) for n in range(lines))
    form = {"files": {"file": ("a.jsonl", data.encode())}, "data": {"purpose": "batch"}}
    made = http.post("files", headers={"authorization": f"Bearer {key}"}, **form)
    return str(made.raise_for_status().json()["id"])


def submit(http: httpx.Client, at: At, key: str, file_id: str) -> Target:
    """A new batch, as it is polled."""
    body = {"input_file_id": file_id, "endpoint": LINE["url"], "completion_window": "24h"}
    made = http.post("batches", headers={"authorization": f"Bearer {key}"}, json=body)
    return Target(f"{at.base_url}/batches/{made.raise_for_status().json()['id']}", key)


def ended(http: httpx.Client, targets: list[Target]) -> int:
    """Seconds from the first batch's start to the last one's end. All of them must complete."""
    begun, last = [], []
    for target in targets:
        status, batch = "", {}
        while status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.1)
            reply = http.get(target.url, headers={"authorization": f"Bearer {target.key}"})
            batch = reply.raise_for_status().json()
            status = batch["status"]
        if status != "completed":
            raise RuntimeError(f"{target.path} is {status}")
        begun.append(batch["created_at"])
        last.append(batch["completed_at"])
    return int(max(last) - min(begun))


def crowded(
    at: At, targets: list[Target], options: argparse.Namespace
) -> tuple[list[Answer], int, dict[str, cores.Share]]:
    """Every poll, bytes uploaded, and who had the cores."""
    files = Target(f"{at.base_url}/files", at.keys[0])
    with process() as pollers, process() as uploaders:
        owners = {
            **at.pids,
            "pollers": pollers.submit(os.getpid).result(),
            "uploaders": uploaders.submit(os.getpid).result(),
        }
        begins = clock() + START_S
        ends = begins + options.seconds
        polls = pollers.submit(poll_openly, targets, options.clients, options.every, begins, ends)
        time.sleep(START_S)
        before = cores.read(owners)
        size = options.megabytes * MIB
        uploads = uploaders.submit(upload, files, options.uploaders, size, ends)
        time.sleep(max(0, ends - clock()))
        had = cores.shares(before, cores.read(owners), options.seconds)
        return polls.result(), uploads.result(), had


def closed(target: Target, seconds: float) -> list[float]:
    """Seconds of every poll of a few clients that never pause."""
    with process() as clients:
        clients.submit(os.getpid).result()
        return clients.submit(poll_closely, target, CLOSED_CLIENTS, clock() + seconds).result()


def process() -> ProcessPoolExecutor:
    """One process for one kind of client."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=apart)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds below which so large a share of them stays."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"p50": at(0.50), "p95": at(0.95), "p99": at(0.99)}


def shown(seconds: list[float]) -> str:
    """What a person wants to know of them."""
    found = ", ".join(f"{name} {value} ms" for name, value in quantiles(seconds).items())
    return f"{found} of {len(seconds)}"


def told(shares: dict[str, cores.Share]) -> str:
    """Those that had something, most first."""
    busy = sorted(shares.items(), key=lambda item: -item[1].had)
    return ", ".join(
        f"{name} {share.had:.2f} + {share.waited:.2f}" for name, share in busy if share.had >= 0.01
    )


if __name__ == "__main__":
    main()
