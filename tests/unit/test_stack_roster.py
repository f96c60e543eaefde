"""Are parts started, restarted, counted and stopped as they should be? With small real programs."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from service.stack import process
from service.stack.part import BULK_NICE, Part, PartState, StackError, StopStep
from service.stack.ports import LOOPBACK, choose
from service.stack.roster import LONGEST_DELAY_S, Roster, delay

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "open('deaf', 'w').close(); time.sleep(600)",
)


@pytest.fixture
def roster(tmp_path: Path) -> Iterator[Roster]:
    made = Roster(tmp_path)
    yield made
    made.stop(hurried=lambda: True)


def part_of(folder: Path, *argv: str, name: str = "small") -> Part:
    return Part(
        name=name,
        argv=argv or SLEEP,
        folder=folder,
        environment={},
        ports=(),
        url=None,
        ready=lambda _: True,
        stop=(StopStep(signal.SIGTERM, 5.0),),
        start_s=5.0,
    )


def until(what: Callable[[], bool], *, tick: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        tick()
        time.sleep(0.02)


def test_delays_double_up_to_a_limit() -> None:
    assert [delay(falls) for falls in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert delay(50) == LONGEST_DELAY_S


def test_a_part_that_falls_is_started_again_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    roster = Roster(tmp_path, say=said.append)
    roster.begin(lambda: part_of(tmp_path, "/bin/sh", "-c", "echo last words; exec sleep 600"))
    roster.await_ready()
    (member,) = roster.members
    first = member.pid
    log = roster.log("small")
    until(lambda: log.read_text() == "last words\n")
    assert first is not None
    os.kill(first, signal.SIGKILL)

    until(lambda: member.pid not in (None, first), tick=roster.tick)
    until(lambda: member.state is PartState.RUNNING, tick=roster.tick)

    assert member.restarts == 1
    assert "last words" in said[0]
    roster.stop()


def test_a_part_that_was_never_ready_fails_the_start_with_the_end_of_its_log(
    tmp_path: Path, roster: Roster
) -> None:
    broken = replace(
        part_of(tmp_path, "/bin/sh", "-c", "echo no such file; exit 3"), ready=lambda _: False
    )
    roster.begin(lambda: broken)

    with pytest.raises(StackError, match="ended with 3") as caught:
        roster.await_ready()

    assert "no such file" in str(caught.value)


def test_a_part_that_takes_too_long_fails_the_start(tmp_path: Path, roster: Roster) -> None:
    slow = replace(part_of(tmp_path), ready=lambda _: False, start_s=0.2)
    roster.begin(lambda: slow)

    with pytest.raises(StackError, match="not ready after"):
        roster.await_ready()

    assert roster.members[0].pid is None


def test_a_part_whose_port_was_taken_meanwhile_gets_another(tmp_path: Path, roster: Roster) -> None:
    with socket.create_server((LOOPBACK, choose())) as server:
        offered = iter([server.getsockname()[1], choose()])

        def prepare() -> Part:
            port = next(offered)
            listen = f"import socket, time; s = socket.create_server(('{LOOPBACK}', {port}));"
            argv = (sys.executable, "-c", f"{listen} open('{port}', 'w'); time.sleep(600)")
            return replace(
                part_of(tmp_path, *argv),
                ports=(port,),
                ready=lambda _: (tmp_path / str(port)).exists(),
            )

        roster.begin(prepare)
        roster.await_ready()

        assert roster.part("small").port != server.getsockname()[1]


def test_an_interrupted_start_ends(tmp_path: Path, roster: Roster) -> None:
    roster.begin(lambda: replace(part_of(tmp_path), ready=lambda _: False))

    with pytest.raises(StackError, match="Stopped while starting"):
        roster.await_ready(lambda: True)


def test_a_part_that_ignores_its_signal_is_killed_after_its_grace(
    tmp_path: Path, roster: Roster
) -> None:
    deaf = replace(
        part_of(tmp_path, *STUBBORN),
        stop=(StopStep(signal.SIGTERM, 0.2),),
        ready=lambda _: (tmp_path / "deaf").exists(),
    )
    roster.begin(lambda: deaf)
    roster.await_ready()
    pid = roster.members[0].pid
    assert pid is not None

    roster.stop()

    assert not psutil.pid_exists(pid)


def test_in_a_hurry_no_grace_is_given(tmp_path: Path, roster: Roster) -> None:
    deaf = replace(
        part_of(tmp_path, *STUBBORN),
        stop=(StopStep(signal.SIGTERM, 10_000.0),),
        ready=lambda _: (tmp_path / "deaf").exists(),
    )
    roster.begin(lambda: deaf)
    roster.await_ready()

    roster.stop(hurried=lambda: True)

    assert roster.members[0].state is PartState.STOPPED


def test_what_a_part_started_itself_does_not_outlive_it(tmp_path: Path, roster: Roster) -> None:
    script = "sleep 600 & echo $! > child.new; mv child.new child; wait"
    roster.begin(lambda: part_of(tmp_path, "/bin/sh", "-c", script))
    until((tmp_path / "child").exists)
    child = int((tmp_path / "child").read_text())

    roster.stop()

    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_files_that_a_part_keeps_elsewhere_go_with_it(tmp_path: Path, roster: Roster) -> None:
    elsewhere = tmp_path / "elsewhere.sock"
    elsewhere.touch()
    roster.begin(lambda: replace(part_of(tmp_path), outside=(elsewhere,)))

    roster.stop()

    assert not elsewhere.exists()


def test_each_change_of_state_is_told(tmp_path: Path) -> None:
    seen: list[PartState] = []
    watched: Roster = Roster(tmp_path, changed=lambda: seen.append(watched.members[0].state))
    watched.begin(lambda: part_of(tmp_path))
    watched.await_ready()
    watched.stop()

    assert seen == [PartState.STARTING, PartState.RUNNING, PartState.STOPPED]


def test_a_part_finds_its_temporary_folder_in_the_home(tmp_path: Path, roster: Roster) -> None:
    roster.begin(lambda: part_of(tmp_path, "/bin/sh", "-c", "echo $TMPDIR; exec sleep 600"))

    until(lambda: roster.log("small").read_text() == f"{tmp_path}/tmp\n")


def test_a_log_that_is_too_long_starts_over_under_a_part_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 10)
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as part:
        part.write(b"short")
        process.trim(log)
        assert log.read_bytes() == b"short"
        part.write(b" and longer")
        process.trim(log)
        part.write(b"next")
    assert log.read_bytes() == b"next"
    assert log.with_suffix(".log.1").read_bytes() == b"short and longer"


def test_a_part_that_works_in_bulk_lets_others_go_first(roster: Roster, tmp_path: Path) -> None:
    part = replace(part_of(tmp_path, name="bulk"), nice=BULK_NICE)
    roster.begin(lambda: part)
    (member,) = roster.members
    assert member.pid is not None
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, member.pid) == min(ours + BULK_NICE, 19)
    session = Path(f"/proc/{member.pid}/autogroup")
    if session.exists():
        assert session.read_text().split()[-1] == f"{BULK_NICE}"
