"""Which processes did an earlier stack of this home leave behind? Found and ended here."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGTERM

import psutil

from service.stack.postgres import postmasters
from service.stack.process import MARKER

GRACE_S = 6.0
STORES = ("postgres", "valkey-server", "weed")
# Clocks are set; a process started within this of the recorded time, under its pid, is the one.
SAME_START_S = 2.0


def is_same(pid: int, created: float) -> bool:
    """Whether `pid` is still the process that was started at `created`."""
    try:
        return abs(psutil.Process(pid).create_time() - created) < SAME_START_S
    except psutil.Error:
        return False


def leftovers(home: Path, recorded: Iterable[tuple[int, float]] = ()) -> list[psutil.Process]:
    """Every process of this home's stack but our own.

    A process is known by the marker in its environment, as one of the home's Postgres by its
    working folder, or by (pid, start time) as an earlier stack recorded it. A pid alone says
    nothing: it may have been given to somebody else.
    """
    marker = str(home)
    own = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    found = {process.pid: process for process in postmasters(home / "postgres" / "data")}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == marker:
                found[process.pid] = process
    for pid, created in recorded:
        with suppress(psutil.NoSuchProcess):
            if is_same(pid, created):
                found[pid] = psutil.Process(pid)
    return [process for pid, process in found.items() if pid not in own]


def sweep(
    home: Path,
    recorded: Iterable[tuple[int, float]] = (),
    outside: Iterable[Path] = (),
    grace_s: float = GRACE_S,
) -> int:
    """End what an earlier stack of this home left behind, and remove the files it left outside.

    Only for the one who holds the home's lock. Returns the number of processes ended.
    """
    processes = leftovers(home, recorded)
    stores = [process for process in processes if _is_store(process)]
    # Workers first, so that what they have finished can still be written back.
    _end([process for process in processes if process not in stores], grace_s)
    _end(stores, grace_s)
    for path in outside:
        path.unlink(missing_ok=True)
    return len(processes)


def _is_store(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name().startswith(STORES)
    return False


def _end(processes: list[psutil.Process], grace_s: float) -> None:
    for process in processes:
        with suppress(psutil.Error):
            # On SIGTERM, Postgres would wait for its sessions to end by themselves.
            process.send_signal(SIGINT if process.name().startswith("postgres") else SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
