"""How is a part started, watched and stopped as a process?"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, Signals

import psutil

from service.stack.part import Part

# Every process of a stack carries this variable; its value is the stack's home.
MARKER = "HALFRATE_STACK"
LOG_BYTES = 10_000_000
POLL_S = 0.05
KILL_S = 5.0
AUTOGROUP_TRIES = 10


@dataclass(slots=True)
class Child:
    """A started part."""

    part: Part
    process: subprocess.Popen[bytes]
    created: float  # the kernel's start time, which tells it from a later process of the same pid
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """The part's own pid: nothing stands between."""
        return self.process.pid

    def ended(self) -> bool:
        """Whether the process is gone (and reaped)."""
        return self.process.poll() is not None

    def signal(self, signal: Signals) -> None:
        """Signal the part itself, which knows what its children should hear."""
        if not self.ended():
            self.process.send_signal(signal)

    def kill(self) -> None:
        """End the part and everything it started, and remove what it left outside its folder."""
        # The group may outlive its leader: prefork workers whose parent was killed.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
        for path in self.part.outside:
            path.unlink(missing_ok=True)


def start(part: Part, *, log: Path, environment: Mapping[str, str]) -> Child:
    """Start a part in a session of its own, with its output appended to `log`.

    `environment` goes over the part's own; it holds the MARKER.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    trim(log)
    variables = {
        "PATH": os.defpath,
        "LC_ALL": "C.UTF-8",
        **part.environment,
        **environment,
        # Where setproctitle is installed, it would overwrite the environment, marker and all.
        "SPT_NOENV": "1",
    }
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            part.argv,
            cwd=part.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=part.user,
            group=part.user,
            extra_groups=None if part.user is None else [],
            umask=0o077,
        )
    finally:
        os.close(descriptor)
    if part.nice:
        _lower(process.pid, part.nice)
    try:
        created = psutil.Process(process.pid).create_time()
    except psutil.Error:  # already gone; whoever polls will see it
        created = 0.0
    return Child(part, process, created)


def _lower(pid: int, by: int) -> None:
    """Let others go first. For the whole group, since threads may have been started already; no
    right is needed to go down."""
    with suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PGRP, pid, os.getpriority(os.PRIO_PROCESS, 0) + by)
    # Linux may share the cores out among sessions first, and each part is a session: then it is
    # the session's own figure that counts. Whoever is not root may set one in a tenth of a second.
    session = Path(f"/proc/{pid}/autogroup")
    for _ in range(AUTOGROUP_TRIES):
        try:
            session.write_text(str(by))
        except BlockingIOError:
            time.sleep(POLL_S)
        except OSError:  # another system, or it is gone
            return
        else:
            return


def trim(log: Path) -> None:
    """Keep a log from filling the disk: what is too long becomes `.log.1`, in place of the last.

    It is copied and emptied, since the part goes on appending to the same file; what it writes
    between the two is lost.
    """
    if log.exists() and log.stat().st_size > LOG_BYTES:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)


def stop(children: Sequence[Child], hurried: Callable[[], bool] = lambda: False) -> None:
    """Stop these parts side by side, each by its own steps, and the rest of their groups.

    Args:
        children: all may be stopped at once; those that have ended already are cleaned up after.
        hurried: asked again and again; from its first True on, no grace is given.
    """
    waiting = {child.pid: (child, iter(child.part.stop), 0.0) for child in children}
    while waiting:
        now = time.monotonic()
        for pid, (child, steps, until) in list(waiting.items()):
            if child.ended():
                child.kill()
                del waiting[pid]
                continue
            if now < until and not hurried():
                continue
            step = next(steps, None)
            if step is None:
                child.kill()
                del waiting[pid]
                continue
            child.signal(step.signal)
            waiting[pid] = (child, steps, now + step.grace_s)
        if waiting:
            time.sleep(POLL_S)


def tail(log: Path, lines: int = 15, most_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, [] where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def empty_folder(folder: Path) -> None:
    """Make the folder, or take everything out of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
