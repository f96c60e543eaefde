"""How is a stack steered from outside: started detached, and ended?"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from service.stack.home import Home, holder, locked
from service.stack.part import StackError
from service.stack.process import empty_folder, tail
from service.stack.record import outside_files, read_record, recorded_processes
from service.stack.sweep import sweep

POLL_S = 0.1
# Longer than all graces of a stop together.
DOWN_S = 60.0
HURRIED_S = 20.0


def up_detached(home: Home, arguments: Sequence[str]) -> str:
    """Start a supervisor that outlives us, wait until its stack is ready, return the API's URL.

    Where one runs already, wait for that one.

    Args:
        home: of the stack.
        arguments: of `halfrate up`, without `--home` and `--detach`.

    Raises:
        StackError: it ended before it was ready; the message has the end of its log.
    """
    running = holder(home)
    if running is not None:
        return _await_ready(home, running, lambda: holder(home) != running)
    process = _launch(home, arguments)
    return _await_ready(home, process.pid, lambda: process.poll() is not None)


def down(home: Home) -> int | None:
    """End the stack of this home, whoever started it; its data stays.

    Returns how many processes were found without a supervisor; None where there was one, and it
    has stopped them in order.

    Raises:
        StackError: it could not be ended.
    """
    running = holder(home)
    if running is not None and _ended(home, running, signal.SIGTERM, DOWN_S):
        return None
    if running is not None and not _ended(home, running, signal.SIGTERM, HURRIED_S):
        _ended(home, running, signal.SIGKILL, HURRIED_S)
    if not home.root.is_dir():
        return 0
    with locked(home):
        record = read_record(home)
        count = sweep(home.root, recorded_processes(record), outside_files(record))
        empty_folder(home.temporary)
    return count


def _launch(home: Home, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    home.up_log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "service.cli.main", "up", "--home", str(home.root)]
    descriptor = os.open(home.up_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _await_ready(home: Home, supervisor: int, ended: Callable[[], bool]) -> str:
    while True:
        record = read_record(home)
        # An earlier supervisor's record may still lie there, and say that it is ready.
        if record.supervisor == supervisor and record.ready and record.url is not None:
            return record.url
        if ended():
            raise StackError("\n".join(["The stack did not start.", *tail(home.up_log, 40)]))
        time.sleep(POLL_S)


def _ended(home: Home, supervisor: int, number: signal.Signals, patience_s: float) -> bool:
    """Signal the supervisor and say whether it ended within that time."""
    with suppress(ProcessLookupError):
        os.kill(supervisor, number)
    deadline = time.monotonic() + patience_s
    while holder(home) == supervisor:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    # It gives the lock back a moment before it is gone.
    with suppress(psutil.Error):
        psutil.Process(supervisor).wait(timeout=5)
    return True
