"""Does a sweep end every process of its home, and nobody else's?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from service.stack.process import MARKER
from service.stack.sweep import is_same, leftovers, sweep

Sleeper = subprocess.Popen[bytes]


class Sleepers:
    """Processes that would live for ten minutes, ended with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, home: Path | None, *, deaf: bool = False) -> Sleeper:
        marker = {} if home is None else {MARKER: str(home)}
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else "pass"
        program = f"import signal, time\n{ignore}\nprint(flush=True); time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={"PATH": os.defpath, **marker},
            stdout=subprocess.PIPE,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        self._stack.enter_context(process.stdout)
        assert process.stdout.readline() == b"\n"
        return process


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    with ExitStack() as stack:
        yield Sleepers(stack)


def created(process: Sleeper) -> float:
    return psutil.Process(process.pid).create_time()


def test_processes_of_the_home_are_ended(tmp_path: Path, sleepers: Sleepers) -> None:
    mine = [sleepers.start(tmp_path), sleepers.start(tmp_path)]

    assert sweep(tmp_path) == 2
    assert all(process.poll() is not None for process in mine)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, sleepers: Sleepers) -> None:
    deaf = sleepers.start(tmp_path, deaf=True)

    sweep(tmp_path, grace_s=0.2)

    assert deaf.poll() is not None


def test_another_home_is_left_alone_even_one_below(tmp_path: Path, sleepers: Sleepers) -> None:
    others = [sleepers.start(tmp_path / "below"), sleepers.start(None)]

    assert sweep(tmp_path) == 0
    assert all(process.poll() is None for process in others)


def test_a_recorded_process_is_ended_though_its_environment_says_nothing(
    tmp_path: Path, sleepers: Sleepers
) -> None:
    process = sleepers.start(None)

    assert sweep(tmp_path, [(process.pid, created(process))]) == 1


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(
    tmp_path: Path, sleepers: Sleepers
) -> None:
    process = sleepers.start(None)
    long_ago = created(process) - 3_600

    assert not is_same(process.pid, long_ago)
    assert sweep(tmp_path, [(process.pid, long_ago)]) == 0
    assert process.poll() is None


def test_a_sweep_does_not_end_whoever_called_it(tmp_path: Path) -> None:
    ourselves = psutil.Process()

    assert leftovers(tmp_path, [(ourselves.pid, ourselves.create_time())]) == []


def test_files_left_outside_the_home_are_removed(tmp_path: Path) -> None:
    left = tmp_path / "left.sock"
    left.touch()

    sweep(tmp_path, outside=[left, tmp_path / "never made"])

    assert not left.exists()
