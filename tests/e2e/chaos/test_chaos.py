"""Is nothing lost, and nothing twice, whatever fails and whenever? Read by the files, each time."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from service.doctor import Patient, examine
from tests.e2e.chaos.client import (
    Sent,
    check_files,
    check_rest,
    create,
    ended,
    hold,
    raw_id,
    upload,
    upload_slowly,
)
from tests.e2e.chaos.faults import FAULTS, ONLY, Struck
from tests.e2e.chaos.phases import InBody, Phase
from tests.e2e.chaos.stack import Stack, until
from tests.e2e.chaos.table import Cost, Table

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CELLS = [(fault, phase) for fault in FAULTS for phase in Phase if phase in ONLY[fault]]

# What a pool and a cache may hold more after a hundred batches than after three.
MEMORY_MORE, FILES_MORE = 128, 96


@pytest.mark.parametrize(("fault", "phase"), CELLS, ids=[f"{f}, {p}" for f, p in CELLS])
def test_nothing_is_lost_and_nothing_twice(
    stack: Stack, at_first: dict[str, tuple[int, int]], table: Table, fault: str, phase: Phase
) -> None:
    stack.at_rest()
    sent = Sent.of(f"{fault}/{phase}")
    held = hold(stack, phase, sent)
    with ThreadPoolExecutor(1) as pool:
        try:
            if isinstance(held, InBody):
                uploaded = pool.submit(upload_slowly, stack, held, sent)
                batch = file = None
            else:
                file = upload(stack, sent)
                batch = create(stack, file)
            raw = None if batch is None else raw_id(batch)
            held.reached(raw)
            struck_at = time.monotonic()
            with FAULTS[fault](Struck(stack, phase, held, raw, file)):
                held.release()
            if batch is None:
                batch = create(stack, uploaded.result(timeout=120))
        finally:
            held.release()
    found = ended(stack, batch)
    seconds = time.monotonic() - struck_at
    assert found["status"] == "completed"
    files = check_files(stack, sent, found)
    assert files.lost == []
    # The step that made NaN costs its lines: the engine has tried them again by itself.
    assert files.refused == [sent.refused] or fault == "NaN from the engine"
    check_rest(stack, raw_id(batch))
    stack.execute("UPDATE chaos.clock SET step = '0'")
    _come_to_rest(stack, at_first)
    runs = stack.answered(f"{sent.word} ")
    table.note(fault, phase, Cost(len(files.lost), sum(runs.values()) - len(runs), seconds))


def test_afterwards_everything_is_at_rest(
    stack: Stack, at_first: dict[str, tuple[int, int]]
) -> None:
    _come_to_rest(stack, at_first)
    open_batches = (
        "SELECT id FROM batches WHERE status NOT IN ('completed', 'expired', 'cancelled')"
    )
    assert stack.query(open_batches) == []
    assert stack.query("SELECT 1 FROM shards WHERE state IN ('leased', 'ready')") == []
    report = _doctor(stack)
    assert report == []


def _come_to_rest(stack: Stack, at_first: dict[str, tuple[int, int]]) -> None:
    """Wait until every part runs, no transaction is left open, and none holds much more than at
    first."""
    stack.at_rest()
    busy = "SELECT query FROM pg_stat_activity WHERE starts_with(state, 'idle in transaction')"
    until(lambda: not stack.query(busy), 30, "no transaction is left open")
    until(lambda: not _swollen(stack, at_first), 30, "memory and connections are back")


def _swollen(stack: Stack, at_first: dict[str, tuple[int, int]]) -> list[str]:
    return [
        name
        for name, (memory, files) in stack.footprint().items()
        if memory > at_first[name][0] + MEMORY_MORE or files > at_first[name][1] + FILES_MORE
    ]


def _doctor(stack: Stack) -> list[str]:
    patient = Patient(stack.database, stack.storage, timedelta(seconds=3))
    return [f"{each.check}: {each.what}" for each in examine(patient)]
