"""Does the record say truly what runs, is only its owner's to read, and who may write it?"""

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from service.stack.home import Home, HomeTaken, holder, locked
from service.stack.part import PartState
from service.stack.record import (
    PartRecord,
    StackRecord,
    outside_files,
    read_record,
    recorded_processes,
    status,
    write_record,
)

NAMES = ["postgres", "api"]
HOLD = (
    "import sys, time; from pathlib import Path; from service.stack.home import Home, locked\n"
    "with locked(Home(Path(sys.argv[1]))): print(flush=True); time.sleep(600)"
)


def running_part() -> PartRecord:
    """This very process, as a part."""
    ourselves = psutil.Process()
    return PartRecord(
        name="api",
        pid=ourselves.pid,
        port=18_000,
        url="http://127.0.0.1:18000",
        state=PartState.RUNNING,
        restarts=2,
        created=ourselves.create_time(),
        outside=("/nowhere/a.sock",),
    )


def record_of(*parts: PartRecord) -> StackRecord:
    return StackRecord(
        supervisor=os.getpid(),
        ready=True,
        names=tuple(NAMES),
        url="http://127.0.0.1:18000",
        environment={"HALFRATE_REDIS_URL": "redis://:word@127.0.0.1:1/0"},
        parts=parts,
    )


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def test_a_record_is_read_as_it_was_written(home: Home) -> None:
    record = record_of(running_part())

    write_record(home, record)

    assert read_record(home) == record


def test_only_its_owner_reads_the_record(home: Home) -> None:
    write_record(home, record_of())

    assert stat.S_IMODE(home.record.stat().st_mode) == 0o600
    assert list(home.root.iterdir()) == [home.record]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": [{"name": "api"}]}', '{"parts": 1}'])
def test_a_record_that_cannot_be_read_counts_as_none(home: Home, text: str) -> None:
    home.record.write_text(text)

    assert read_record(home) == StackRecord()


def test_before_any_start_every_part_is_stopped(home: Home) -> None:
    shown = [part.shown() for part in status(home, NAMES)]

    stopped = {"pid": None, "port": None, "url": None, "state": "stopped", "restarts": 0}
    assert shown == [{"name": "postgres", **stopped}, {"name": "api", **stopped}]


def test_a_part_that_lives_is_shown_with_its_pid(home: Home) -> None:
    write_record(home, record_of(running_part()))

    assert status(home, [])[1].shown() == {
        "name": "api",
        "pid": os.getpid(),
        "port": 18_000,
        "url": "http://127.0.0.1:18000",
        "state": "running",
        "restarts": 2,
    }


def test_a_pid_that_was_given_to_somebody_else_is_not_shown(home: Home) -> None:
    part = running_part()
    assert part.created is not None
    write_record(home, record_of(replace(part, created=part.created - 3_600)))

    api = status(home, [])[1]

    assert (api.pid, api.state) == (None, PartState.STOPPED)


def test_a_part_that_fell_under_a_supervisor_is_about_to_be_restarted(home: Home) -> None:
    write_record(home, record_of(replace(running_part(), created=1.0)))

    with locked(home):
        api = status(home, [])[1]

    assert (api.pid, api.state) == (None, PartState.RESTARTING)


def test_a_sweep_learns_pids_and_files_from_the_record(home: Home) -> None:
    part = running_part()
    record = record_of(part, replace(part, name="postgres", pid=None))

    assert recorded_processes(record) == [(part.pid, part.created)]
    assert outside_files(record) == [Path("/nowhere/a.sock")] * 2


def test_a_home_has_one_supervisor_at_most(home: Home) -> None:
    with locked(home):
        assert holder(home) == os.getpid()
        with pytest.raises(HomeTaken), locked(home):
            pass

    assert holder(home) is None


def test_asking_for_the_supervisor_makes_no_home(tmp_path: Path) -> None:
    home = Home.at(tmp_path / "none")

    assert holder(home) is None
    assert not home.root.exists()


def test_a_killed_supervisor_holds_nothing(home: Home) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.root)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert holder(home) == process.pid

        process.send_signal(signal.SIGKILL)
        process.wait()

    assert holder(home) is None
    with locked(home):
        assert holder(home) == os.getpid()
