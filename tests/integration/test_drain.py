"""What comes of lines whose engine fails, in every way that an engine can fail?"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson
import pytest

from engine.request import FailureReason, Request
from service.batch import BatchStatus, LineState, ShardState
from service.db import lines, queue, session
from service.storage import StorageError
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Breaking, Failing, Misshapen, Watched
from tests.threads import running, wait_until
from worker import execute, retry
from worker.execute import DEATHS
from worker.fetch import PIECE
from worker.resources import Resources


def planned(pipeline: Pipeline, texts: list[str]) -> UUID:
    lines_of = [embedding_line(f"{n}", text) for n, text in enumerate(texts)]
    batch_id = pipeline.submit(lines_of)
    pipeline.validate()
    pipeline.plan()
    return batch_id


def error_of(line: dict[str, Any]) -> tuple[int, str]:
    return line["response"]["status_code"], line["response"]["body"]["error"]["code"]


@pytest.mark.parametrize(
    ("reason", "status_code", "code"),
    [
        (FailureReason.TOO_LONG, 400, "context_length_exceeded"),
        (FailureReason.INVALID, 400, "invalid_value"),
        (FailureReason.NON_FINITE, 500, "non_finite"),
    ],
)
def test_a_final_failure_is_its_lines_error_at_once(
    pipeline: Pipeline, reason: FailureReason, status_code: int, code: str
) -> None:
    seen: Counter[str] = Counter()
    batch_id = planned(pipeline, ["fine", f"{reason} x", "fine too"])
    pipeline.drain(make=lambda: Failing(seen))
    pipeline.assemble()
    pipeline.clean()
    invariants.check(pipeline, batch_id)
    (line,) = pipeline.errors(batch_id)
    assert (line["custom_id"], error_of(line)) == ("1", (status_code, code))
    assert line["response"]["body"]["error"]["message"] == f"made up: {reason}"
    assert set(seen.values()) == {1}
    assert pipeline.line_rows(batch_id)[1].error_code == code


def test_every_reason_of_the_engine_has_a_failure() -> None:
    assert set(execute._FAILURES) == set(FailureReason)


def test_out_of_memory_is_tried_again_in_a_new_shard_and_is_final_in_the_end(
    pipeline: Pipeline,
) -> None:
    seen: Counter[str] = Counter()
    batch_id = planned(pipeline, ["fine", "out_of_memory x", "fine too", "out_of_memory y"])
    pipeline.drain(make=lambda: Failing(seen))
    first, again = pipeline.shards(batch_id)
    assert (first.state, again.state) == (ShardState.DONE, ShardState.READY)
    assert sorted(again.lines) == [2, 4]
    rows = pipeline.line_rows(batch_id)
    assert [row.attempts for row in rows] == [1, 1, 1, 1]
    assert rows[1].state is LineState.PENDING
    assert rows[1].error_code == "out_of_memory"
    assert rows[1].next_try_at is not None
    assert again.not_before >= rows[1].next_try_at
    assert pipeline.batch(batch_id).status is BatchStatus.IN_PROGRESS
    pipeline.finish(batch_id, make=lambda: Failing(seen))
    invariants.check(pipeline, batch_id)
    assert [error_of(line) for line in pipeline.errors(batch_id)] == [(500, "out_of_memory")] * 2
    tries = pipeline.resources.settings.max_attempts
    assert seen == {"fine": 1, "fine too": 1, "out_of_memory x": tries, "out_of_memory y": tries}
    assert [row.attempts for row in pipeline.line_rows(batch_id)] == [1, tries, 1, tries]


def test_a_retry_shard_waits_for_the_last_of_its_lines(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = planned(pipeline, ["out_of_memory x", "out_of_memory y"])
    monkeypatch.setattr(retry, "luck", iter([0.9, 0.0]).__next__)
    with pipeline.resources.database.transaction() as transaction:
        before = session.now(transaction)
    pipeline.drain(make=lambda: Failing(Counter()))
    again = pipeline.shards(batch_id)[1]
    assert again.not_before >= before + timedelta(seconds=0.9 * retry.FIRST_DELAY_S)


def test_out_of_memory_that_passes_leaves_no_trace_in_the_files(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline, ["out_of_memory x", "fine"])
    pipeline.drain(make=lambda: Failing(Counter()))
    pipeline.finish(batch_id)
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed) == (2, 0)
    row = pipeline.line_rows(batch_id)[0]
    assert (row.attempts, row.error_code, row.next_try_at) == (2, None, None)


def test_one_failed_input_fails_its_line_and_costs_nothing(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a", ["one", "invalid x", "two"])])
    pipeline.validate()
    pipeline.plan()
    pipeline.drain(make=lambda: Failing(Counter()))
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed, batch.input_tokens) == (0, 1, 0)


def test_an_engine_that_breaks_is_made_anew_and_its_lines_run_again(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline, ["one", "two"])
    made: list[Watched] = []

    class Once(Watched):
        def step(self) -> Any:
            if len(made) == 1:
                raise RuntimeError("the device is gone")
            return super().step()

    def make() -> Watched:
        made.append(Once(Counter()))
        return made[-1]

    pipeline.drain(make=make)
    assert len(made) == 2
    pipeline.finish(batch_id)
    assert invariants.check(pipeline, batch_id).completed == 2


def test_a_line_that_breaks_the_engine_fails_with_its_shard_and_no_other(
    pipeline: Pipeline,
) -> None:
    small = pipeline.having(shard_s=0.001)
    batch_id = planned(small, ["one", "break it", "two", "three", "four"])
    other = planned(small, ["five", "six"])
    seen: Counter[str] = Counter()
    for _ in range(8):
        small.skip_waits()
        with small.engine(make=lambda: Breaking(seen)) as drain, running(drain.run, drain.run):
            pass
    small.finish(batch_id, make=lambda: Breaking(seen))
    invariants.check(small, batch_id)
    assert [(line["custom_id"], error_of(line)) for line in small.errors(batch_id)] == [
        ("1", (500, "internal_error"))
    ]
    assert invariants.check(small, other).completed == 2


def test_shards_that_share_a_broken_engine_are_no_suspects_for_ever(pipeline: Pipeline) -> None:
    """Both are in the engine when it breaks: neither is blamed before it broke it alone."""
    small = pipeline.having(shard_s=0.001)
    batch_id = planned(small, ["an innocent", "break it"])

    made: list[Breaking] = []

    class Meeting(Breaking):
        """The first waits for both; the later ones give a companion some time to come."""

        patience = 0

        def submit(self, requests: Any) -> None:
            self.patience = 30
            super().submit(requests)

        def step(self) -> Any:
            if len(self._waiting) < 2 and (self is made[0] or self.patience):
                self.patience -= 1
                threading.Event().wait(0.01)
                return []
            return super().step()

    def make() -> Breaking:
        made.append(Meeting(Counter()))
        return made[-1]

    with small.engine(make=make) as drain:
        for _ in range(8):
            small.skip_waits()
            with running(drain.run, drain.run):
                pass
    innocent, breaking = sorted(small.shards(batch_id), key=lambda shard: shard.lines)
    assert (innocent.state, breaking.state) == (ShardState.DONE, ShardState.DONE)
    assert (innocent.failures, innocent.deaths) == (0, 1)
    assert breaking.failures == small.resources.settings.max_attempts
    small.finish(batch_id)
    invariants.check(small, batch_id)
    assert [line["custom_id"] for line in small.output(batch_id)] == ["0"]
    assert [line["custom_id"] for line in small.errors(batch_id)] == ["1"]


def test_a_bug_in_answering_a_shard_does_not_stop_the_next_tenants(pipeline: Pipeline) -> None:
    buggy = planned(pipeline, ["bug", "beside it"])
    other = planned(pipeline, ["fine"])
    pipeline.drain(make=lambda: Misshapen(Counter()))
    assert pipeline.batch(other).status is BatchStatus.FINALIZING
    (shard,) = pipeline.shards(buggy)
    assert (shard.state, shard.failures, shard.deaths) == (ShardState.READY, 1, 0)
    pipeline.finish(buggy, make=lambda: Misshapen(Counter()))
    batch = invariants.check(pipeline, buggy)
    assert (batch.completed, batch.failed) == (1, 1)
    assert [error_of(line) for line in pipeline.errors(buggy)] == [(500, "internal_error")]
    assert invariants.check(pipeline, other).completed == 1


@pytest.mark.parametrize("engine", [Misshapen, Breaking])
@pytest.mark.parametrize("most", [1, 3])
def test_of_a_shard_that_fails_only_the_line_at_fault_does(
    pipeline: Pipeline, engine: type[Watched], most: int
) -> None:
    """By halving, as the line that kills workers is found; `most` tries are those of a line that
    was run, and this one never was."""
    few = pipeline.having(max_attempts=most)
    texts = [f"text {n}" for n in range(11)]
    texts[7] = "bug" if engine is Misshapen else "break it"
    seen: Counter[str] = Counter()
    batch_id = planned(few, texts)
    few.finish(batch_id, make=lambda: engine(seen), rounds=20)
    batch = invariants.check(few, batch_id)
    assert (batch.completed, batch.failed) == (10, 1)
    assert [(line["custom_id"], error_of(line)) for line in few.errors(batch_id)] == [
        ("7", (500, "internal_error"))
    ]
    # Each is told by its attempts alone: what failed before it was cut off is no line's attempt.
    assert {row.attempts for row in few.line_rows(batch_id)} == {1}
    # Tried twice whole, then once or twice in each of the four shards that it was in.
    assert seen[texts[7]] <= 8


def test_two_lines_at_fault_are_both_found(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline, ["bug one", "two", "three", "bug four", "five"])
    pipeline.finish(batch_id, make=lambda: Misshapen(Counter()), rounds=20)
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed) == (3, 2)
    assert [line["custom_id"] for line in pipeline.errors(batch_id)] == ["0", "3"]


def test_a_store_that_is_away_costs_no_line_an_attempt(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = planned(pipeline, ["one", "two"])
    away = StorageError("made up")

    def refuse(resources: Resources, *_: object) -> None:
        raise away

    with monkeypatch.context() as patch:
        patch.setattr(execute, "flush", refuse)
        for _ in range(pipeline.resources.settings.max_attempts + 2):
            pipeline.skip_waits()
            pipeline.drain()
    (shard,) = pipeline.shards(batch_id)
    assert (shard.state, shard.failures) == (ShardState.READY, 0)
    pipeline.finish(batch_id)
    assert invariants.check(pipeline, batch_id).completed == 2


def test_an_input_whose_bytes_are_gone_fails_its_lines(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline, ["one", "two"])
    with pipeline.resources.database.transaction() as transaction:
        batch = transaction.get_one(lines.Batch, batch_id)
        key = transaction.get_one(execute.File, batch.input_file_id).storage_key
    pipeline.resources.storage.delete([key])
    pipeline.finish(batch_id)
    batch = invariants.check(pipeline, batch_id)
    assert (batch.status, batch.failed) == (BatchStatus.COMPLETED, 2)
    # They are not searched for the one at fault: there is none.
    assert len(pipeline.shards(batch_id)) == 1


def test_a_worker_that_stops_flushes_and_hands_back_the_rest(pipeline: Pipeline) -> None:
    batch_id = planned(pipeline, [f"text {n}" for n in range(10)])
    seen: Counter[str] = Counter()
    stop, gate = [False], _half_open(seen)
    with (
        pipeline.engine(make=lambda: gate, stopping=lambda: stop[0]) as drain,
        running(drain.run),
    ):
        wait_until(lambda: gate.counters.requests == 4)
        stop[0] = True
    assert pipeline.batch(batch_id).completed == 4
    (shard,) = pipeline.shards(batch_id)
    assert (shard.state, shard.failures, shard.deaths) == (ShardState.READY, 0, 0)
    with pipeline.resources.database.transaction() as transaction:
        assert shard.not_before <= session.now(transaction)
    again: Counter[str] = Counter()
    pipeline.finish(batch_id, make=lambda: Watched(again))
    assert len(again) == 6
    assert invariants.check(pipeline, batch_id).completed == 10


def _half_open(seen: Counter[str]) -> Watched:
    """Answers four, and then nothing more."""

    class Four(Watched):
        def step(self) -> Any:
            return super().step() if self.counters.requests < 4 else []

    return Four(seen)


def test_no_more_shards_are_claimed_than_there_are_slots(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.001)
    batch_id = planned(small, [f"text {n}" for n in range(6)])
    stop = [False]

    class Never(Watched):
        def step(self) -> Any:
            return []

    def leased() -> int:
        return sum(shard.state is ShardState.LEASED for shard in small.shards(batch_id))

    make: Callable[[], Watched] = lambda: Never(Counter())  # noqa: E731 - typed for the call
    with small.engine(make=make, stopping=lambda: stop[0]) as drain, running(*[drain.run] * 5):
        wait_until(lambda: leased() == small.resources.worker_settings.slots)
        drain.run()  # all slots work: returns at once
        assert leased() == small.resources.worker_settings.slots
        stop[0] = True
    assert leased() == 0


def test_dimensions_other_than_the_models_own_are_refused(pipeline: Pipeline) -> None:
    made = orjson.loads(embedding_line("own"))
    own = {**made, "body": {**made["body"], "dimensions": 32}}
    other = {**own, "custom_id": "other", "body": {**made["body"], "dimensions": 16}}
    batch_id = pipeline.submit([orjson.dumps(own), orjson.dumps(other)])
    pipeline.run()
    invariants.check(pipeline, batch_id)
    assert [line["custom_id"] for line in pipeline.output(batch_id)] == ["own"]
    (line,) = pipeline.errors(batch_id)
    assert line["response"]["body"]["error"]["param"] == "dimensions"


def test_far_and_near_lines_are_read_whole(pipeline: Pipeline) -> None:
    bad = orjson.dumps("x" * 100_000).decode()
    rows = [
        embedding_line(f"{n}", "y" if n % 3 else "z" * (n * 400))
        if n % 2
        else embedding_line(f"{n}").replace(b'"a text"', b'"a", "unheard": ' + bad.encode())
        for n in range(60)
    ]
    batch_id = pipeline.submit(rows)
    pipeline.run()
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed) == (30, 30)


def test_the_line_that_kills_its_worker_is_found_and_the_others_are_answered(
    pipeline: Pipeline,
) -> None:
    """A death is played by a claim whose lease runs out; the poison kills whoever runs it."""
    batch_id = pipeline.submit([embedding_line(f"{n}", f"text {n}") for n in range(9)])
    pipeline.validate()
    pipeline.plan()
    poison, deaths = 5, 0
    for _ in range(40):
        ready = [shard for shard in pipeline.shards(batch_id) if shard.state is ShardState.READY]
        if not ready:
            break
        first = ready[0]
        # A shard that is only cut, or whose line is given up, runs nothing and so kills nobody.
        runs = first.deaths < DEATHS or (len(first.lines) == 1 and first.deaths == DEATHS)
        if poison in first.lines and runs:
            with pipeline.resources.database.transaction() as transaction:
                claimed = queue.claim_shard(
                    transaction,
                    "stub-embed",
                    worker="doomed",
                    now=session.now(transaction),
                    lease=timedelta(0),
                )
                assert claimed is not None
                queue.begin(transaction, claimed.lease)
            pipeline.lose_workers()
            deaths += 1
        else:
            pipeline.drain_one()
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed) == (8, 1)
    (failed,) = pipeline.errors(batch_id)
    assert failed["custom_id"] == f"{poison - 1}"
    assert error_of(failed) == (500, "worker_crash")
    # Two at first, one for each halving of nine lines, and one more of the line by itself.
    assert deaths <= 2 + 4 + 1


def test_a_shard_that_waits_for_the_engine_dies_no_death(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.000_1)
    batch_id = planned(small, ["one text", "another"])
    with small.resources.database.transaction() as transaction:
        now = session.now(transaction)
        claimed = [
            queue.claim_shard(
                transaction, "stub-embed", worker="doomed", now=now, lease=timedelta(0)
            )
            for _ in range(2)
        ]
        assert claimed[0] is not None
        queue.begin(transaction, claimed[0].lease)
    small.lose_workers()
    assert [shard.deaths for shard in small.shards(batch_id)] == [1, 0]
    small.finish(batch_id)
    assert invariants.check(small, batch_id).completed == 2


class Calls(Watched):
    """Notes how many requests each call handed in."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(Counter(), results_per_step=8)
        self._sizes = sizes

    def submit(self, requests: Iterable[Request]) -> None:
        arrived = list(requests)
        self._sizes.append(len(arrived))
        super().submit(arrived)


def test_a_long_shard_is_handed_in_piece_by_piece(pipeline: Pipeline) -> None:
    sizes: list[int] = []
    number = 2 * PIECE + 10
    batch_id = planned(pipeline, [f"text {n}" for n in range(number)])
    assert len(pipeline.shards(batch_id)) == 1
    pipeline.drain(make=lambda: Calls(sizes))
    assert sizes == [PIECE, PIECE, 10]
    assert pipeline.finish(batch_id).completed == number
    invariants.check(pipeline, batch_id)


def test_a_shard_that_must_end_between_two_pieces_is_handed_back(pipeline: Pipeline) -> None:
    sizes: list[int] = []
    batch_id = planned(pipeline, [f"text {n}" for n in range(2 * PIECE)])
    # Asked before the claim, before the first piece, and then before the second.
    asked = iter([False, False])
    with pipeline.engine(make=lambda: Calls(sizes), stopping=lambda: next(asked, True)) as drain:
        drain.run()
    (shard,) = pipeline.shards(batch_id)
    assert shard.state is ShardState.READY
    assert sizes == [PIECE]
    assert pipeline.finish(batch_id).completed == 2 * PIECE
    invariants.check(pipeline, batch_id)
