"""How quickly is a batch shown while many clients poll and some upload?

Starts a stack of its own in a temporary home with a stub model, and in it some batches at once over
several projects. First the crowd: each client polls one of them at its own moment of each interval,
whatever the last answer took (open loop, so a slow server is not spared), while others upload
without pause. Then the limit: a few clients that ask again as soon as they are answered (closed
loop). All over loopback, for a bounded time.

    .venv/bin/python tests/bench/polling.py [--clients 500] [--every 10] [--uploaders 16]
        [--batches 50] [--projects 5] [--lines 100] [--seconds 30] [--limit-seconds 10]
        [--megabytes 4]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import httpx

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
        print(json.dumps(asyncio.run(measure(at, options)), sort_keys=True))


@dataclass(frozen=True)
class At:
    """Where the API is, and a key of each project."""

    base_url: str
    keys: list[str]


@dataclass(frozen=True)
class Poll:
    """What one client asks for, and as whom."""

    path: str
    headers: dict[str, str]


@contextmanager
def stack(folder: Path, projects: int) -> Iterator[At]:
    """A stack with a stub model and so many projects."""
    home, catalog = folder / "home", folder / "models.toml"
    catalog.write_text(CATALOG, encoding="utf-8")
    # Handed on to the stack, with one setting changed.
    environment = {**os.environ, "HALFRATE_CATALOG": str(catalog)}  # noqa: TID251
    command = [HALFRATE, "up", "--home", str(home), "--detach"]
    subprocess.run(command, check=True, env=environment)
    try:
        lines = (home / "client.env").read_text(encoding="utf-8").splitlines()
        client = dict(line.split("=", 1) for line in lines if "=" in line)
        yield At(client["OPENAI_BASE_URL"] + "/", [_key(home, n) for n in range(projects)])
    finally:
        subprocess.run([HALFRATE, "down", "--home", str(home)], check=True, env=environment)


def _key(home: Path, number: int) -> str:
    """A key of a new project."""
    command = [HALFRATE, "key", "create", "--home", str(home), "--project", f"project {number}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def measure(at: At, options: argparse.Namespace) -> dict[str, float]:
    """Both phases; answers milliseconds and requests a second."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=at.base_url, limits=limits, timeout=60) as http:
        headers = [{"authorization": f"Bearer {key}"} for key in at.keys]
        files = await asyncio.gather(*(put_up(http, each, options.lines) for each in headers))
        owners = [number % len(headers) for number in range(options.batches)]
        # All at once, just before the crowd: they are checked, planned and run beside it.
        submitted = (submit(http, headers[owner], files[owner]) for owner in owners)
        polls = await asyncio.gather(*submitted)
        crowd, uploaded = await crowded(http, polls, options)
        print(
            f"{options.clients} clients every {options.every:g} s beside {options.uploaders}"
            f" uploaders ({uploaded / MIB / options.seconds:.0f} MiB/s): {shown(crowd)}"
        )
        took_s = await ended(http, polls)
        print(
            f"{options.batches} batches of {options.lines} lines over {options.projects} projects:"
            f" the last one had ended after {took_s} s"
        )
        limit = await closed(http, polls[0], options.limit_seconds)
        rate = len(limit) / options.limit_seconds
        print(f"{CLOSED_CLIENTS} clients without pause: {rate:.0f} requests/s, {shown(limit)}")
    return {
        "batches_ended_s": took_s,
        "crowd_polls": len(crowd),
        "crowd_p50_ms": quantile(crowd, 0.50),
        "crowd_p95_ms": quantile(crowd, 0.95),
        "crowd_p99_ms": quantile(crowd, 0.99),
        "uploaded_mib_per_s": round(uploaded / MIB / options.seconds, 1),
        "limit_requests_per_s": round(rate, 1),
        "limit_p50_ms": quantile(limit, 0.50),
        "limit_p95_ms": quantile(limit, 0.95),
    }


async def put_up(http: httpx.AsyncClient, headers: dict[str, str], lines: int) -> str:
    """An input file of so many lines; its id."""
    body = {"model": "stub-embed", "input": "a text"}
    data = "\n".join(json.dumps({**LINE, "custom_id": str(n), "body": body}) for n in range(lines))
    form = {"files": {"file": ("a.jsonl", data.encode())}, "data": {"purpose": "batch"}}
    made = (await http.post("files", headers=headers, **form)).raise_for_status()
    return str(made.json()["id"])


async def submit(http: httpx.AsyncClient, headers: dict[str, str], file_id: str) -> Poll:
    """A new batch, as it is polled."""
    body = {"input_file_id": file_id, "endpoint": LINE["url"], "completion_window": "24h"}
    made = (await http.post("batches", headers=headers, json=body)).raise_for_status()
    return Poll(f"batches/{made.json()['id']}", headers)


async def ended(http: httpx.AsyncClient, polls: list[Poll]) -> int:
    """Seconds from the first batch's start to the last one's end. All of them must complete."""
    begun, last = [], []
    for poll in polls:
        status, batch = "", {}
        while status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.1)
            reply = await http.get(poll.path, headers=poll.headers)
            batch = reply.raise_for_status().json()
            status = batch["status"]
        if status != "completed":
            raise RuntimeError(f"{poll.path} is {status}")
        begun.append(batch["created_at"])
        last.append(batch["completed_at"])
    return int(max(last) - min(begun))


async def crowded(
    http: httpx.AsyncClient, polls: list[Poll], options: argparse.Namespace
) -> tuple[list[float], int]:
    """Seconds of every poll, and bytes uploaded."""
    took: list[float] = []

    async def poll(number: int, begun: float, ends: float) -> None:
        due = begun + options.every * number / options.clients
        while due < ends:
            await asyncio.sleep(max(0, due - time.monotonic()))
            took.append(await timed(http, polls[number % len(polls)]))
            due += options.every

    # In a process of their own: what sending costs the client is not to be measured.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        begun = time.monotonic() + 2  # while it starts
        ends = begun + options.seconds
        where = (str(http.base_url), polls[0].headers)
        sizes = (options.uploaders, options.megabytes * MIB)
        uploads = asyncio.get_running_loop().run_in_executor(other, upload, *where, *sizes, ends)
        await together(*(poll(number, begun, ends) for number in range(options.clients)))
        return took, await uploads


def upload(base_url: str, headers: dict[str, str], uploaders: int, size: int, ends: float) -> int:
    """Bytes that so many clients got up, one file of `size` after the other, until then."""
    data = b"x" * (size - 1) + b"\n"

    async def one(http: httpx.AsyncClient) -> int:
        done = 0
        while time.monotonic() < ends:
            form = {"files": {"file": ("a.txt", data)}, "data": {"purpose": "user_data"}}
            made = (await http.post("files", **form)).raise_for_status().json()
            done += made["bytes"]
            (await http.delete(f"files/{made['id']}")).raise_for_status()
        return done

    async def all_of_them() -> int:
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60) as http:
            return sum(await asyncio.gather(*(one(http) for _ in range(uploaders))))

    return asyncio.run(all_of_them())


async def closed(http: httpx.AsyncClient, target: Poll, seconds: float) -> list[float]:
    """Seconds of every poll of a few clients that never pause."""
    ends = time.monotonic() + seconds
    took: list[float] = []

    async def poll() -> None:
        while time.monotonic() < ends:
            took.append(await timed(http, target))

    await together(*(poll() for _ in range(CLOSED_CLIENTS)))
    return took


async def together(*tasks: Coroutine[None, None, None]) -> None:
    """All of them, or the first fault."""
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)


async def timed(http: httpx.AsyncClient, poll: Poll) -> float:
    """Seconds of one GET."""
    begun = time.monotonic()
    (await http.get(poll.path, headers=poll.headers)).raise_for_status()
    return time.monotonic() - begun


def quantile(seconds: list[float], share: float) -> float:
    """Milliseconds that so large a share of them stays below."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def shown(seconds: list[float]) -> str:
    """What a person wants to know of them."""
    return f"p50 {quantile(seconds, 0.5)} ms, p95 {quantile(seconds, 0.95)} ms of {len(seconds)}"


if __name__ == "__main__":
    main()
