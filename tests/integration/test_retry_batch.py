"""Does a retry run what a batch left without a success, that alone, and once?"""

from collections import Counter

import pytest
from sqlalchemy import update

from service.batch import BatchStatus, LineState
from service.db import session
from service.db.models import Batch, File, RequestLine
from service.errors import Conflict
from service.ids import Prefix, parse, show
from tests import invariants
from tests.integration.api_server import api_over
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Failing, Watched
from tests.threads import running
from worker import validate

TEXTS = ["fine", "invalid one", "fine too", "invalid two"]


def with_failures(pipeline: Pipeline) -> Batch:
    """An ended batch whose second and fourth request failed; blank lines shift their numbers."""
    lines = [embedding_line(f"ü{n}", text) for n, text in enumerate(TEXTS)]
    data = b"\xef\xbb\xbf\n" + b"\r\n\n".join(lines)
    batch_id = pipeline.submit(data)
    pipeline.finish(batch_id, make=lambda: Failing(Counter()))
    batch = invariants.check(pipeline, batch_id)
    assert (batch.completed, batch.failed) == (2, 2)
    return batch


def file_of(pipeline: Pipeline, batch: Batch) -> File:
    with pipeline.resources.database.transaction() as transaction:
        return transaction.get_one(File, batch.input_file_id)


def test_the_failed_lines_run_again_as_a_batch_of_their_own(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    again = pipeline.retry(source.id)
    seen: Counter[str] = Counter()
    pipeline.finish(again, make=lambda: Watched(seen))
    batch = invariants.check(pipeline, again)
    assert (batch.status, batch.total, batch.completed) == (BatchStatus.COMPLETED, 2, 2)
    assert batch.model == "stub-embed"
    # Only they were run, under their custom_ids and the numbers they have in the same file.
    assert seen == {"invalid one": 1, "invalid two": 1}
    assert [line["custom_id"] for line in pipeline.output(again)] == ["ü1", "ü3"]
    before = {row.custom_id: row.line for row in pipeline.line_rows(source.id)}
    assert {row.custom_id: row.line for row in pipeline.line_rows(again)} == {
        "ü1": before["ü1"],
        "ü3": before["ü3"],
    }
    # The batch before it stands as it was, but for the link.
    assert invariants.check(pipeline, source.id).retried_by == again
    assert batch.retry_of == source.id


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_lines_that_never_ran_are_run_by_a_retry(pipeline: Pipeline, end: str) -> None:
    small = pipeline.having(shard_s=0.002)
    batch_id = small.submit([embedding_line(f"{n}", f"text {n}") for n in range(9)])
    small.validate()
    small.plan()
    small.drain_one()
    if end == "expired":
        small.expire(batch_id)
    else:
        small.cancel(batch_id)
    small.finish(batch_id)
    source = invariants.check(small, batch_id)
    assert source.status == end
    assert 0 < source.completed < source.total
    again = small.retry(batch_id)
    small.finish(again)
    batch = invariants.check(small, again)
    assert (batch.total, batch.completed) == (source.total - source.completed,) * 2
    names = [line["custom_id"] for each in (batch_id, again) for line in small.output(each)]
    assert sorted(names) == [f"{n}" for n in range(9)]


def test_a_retry_has_a_window_of_its_own_and_the_rest_of_the_first(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    with pipeline.resources.database.transaction() as transaction:
        transaction.execute(
            update(Batch).values(
                completion_window="2h", metadata_={"team": "tags"}, output_expires_after_s=7200
            )
        )
        before = session.now(transaction)
    made = pipeline.batch(pipeline.retry(source.id))
    assert 7190 < (made.expires_at - before).total_seconds() < 7300
    assert (made.metadata_, made.output_expires_after_s) == ({"team": "tags"}, 7200)
    assert (made.endpoint, made.input_file_id) == (source.endpoint, source.input_file_id)


def test_asked_again_it_is_the_same_batch_running_or_ended(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    first = pipeline.retry(source.id)
    assert pipeline.retry(source.id) == first
    pipeline.finish(first, make=lambda: Failing(Counter()))
    assert pipeline.retry(source.id) == first
    # What that one left is its own to retry.
    second = pipeline.retry(first)
    pipeline.finish(second)
    assert invariants.check(pipeline, second).completed == 2
    assert pipeline.batch(second).retry_of == first


def test_two_that_ask_at_once_get_the_same_batch(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    made: list[object] = []
    with running(*[lambda: made.append(pipeline.retry(source.id))] * 4):
        pass
    assert len(made) == 4
    assert len(set(made)) == 1


@pytest.mark.parametrize("end", ["cancelled", "deleted"])
def test_a_retry_that_came_to_nothing_makes_room_for_another(pipeline: Pipeline, end: str) -> None:
    source = with_failures(pipeline)
    first = pipeline.retry(source.id)
    pipeline.cancel(first)
    pipeline.finish(first)
    assert invariants.check(pipeline, first).status is BatchStatus.CANCELLED
    if end == "deleted":
        assert pipeline.delete(first)
        pipeline.remove()
    second = pipeline.retry(source.id)
    assert second != first
    pipeline.finish(second)
    assert invariants.check(pipeline, second).completed == 2
    assert pipeline.batch(source.id).retried_by == second


def test_what_cannot_be_retried_says_why(pipeline: Pipeline) -> None:
    whole = pipeline.submit([embedding_line("a")])
    with pytest.raises(Conflict, match="status 'validating'"):
        pipeline.retry(whole)
    pipeline.finish(whole)
    refused = pipeline.submit([b"no JSON"])
    pipeline.validate()
    assert pipeline.batch(refused).status is BatchStatus.FAILED
    for batch_id in (whole, refused):
        with pytest.raises(Conflict, match="Nothing is left"):
            pipeline.retry(batch_id)


def test_without_the_input_file_there_is_no_retry(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    with pipeline.resources.database.transaction() as transaction:
        transaction.execute(
            update(File).where(File.id == source.input_file_id).values(deleted_at=source.created_at)
        )
    with pytest.raises(Conflict, match="input file"):
        pipeline.retry(source.id)


def test_bytes_that_are_gone_fail_the_retry_and_another_may_come(pipeline: Pipeline) -> None:
    """The row says that they are there; only the store knows better."""
    source = with_failures(pipeline)
    key = file_of(pipeline, source).storage_key
    data = pipeline.resources.storage.read(key)
    pipeline.resources.storage.delete([key])
    first = pipeline.retry(source.id)
    pipeline.validate()
    failed = pipeline.batch(first)
    assert failed.status is BatchStatus.FAILED
    assert failed.errors is not None
    assert failed.errors[0]["code"] == "input_file_missing"
    pipeline.resources.storage.put(key, data)
    second = pipeline.retry(source.id)
    pipeline.finish(second)
    assert invariants.check(pipeline, second).completed == 2


def test_a_batch_of_several_models_is_retried_on_the_models_its_lines_name(
    pipeline: Pipeline,
) -> None:
    batch_id = pipeline.submit(
        [
            embedding_line("a", "invalid"),
            embedding_line("b", "fine", model="stub-other"),
            embedding_line("c", "invalid", model="stub-other"),
        ]
    )
    models = ("stub-embed", "stub-other")
    pipeline.finish(batch_id, *models, make=lambda: Failing(Counter()))
    again = pipeline.retry(batch_id)
    pipeline.finish(again, *models)
    assert invariants.check(pipeline, again).model is None
    assert [line["response"]["body"]["model"] for line in pipeline.output(again)] == list(models)


def test_a_cancel_during_the_taking_over_leaves_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_failures(pipeline)
    again = pipeline.retry(source.id)
    take_over = validate.lines.take_over

    def cancelled_meanwhile(*given: object, **named: object) -> int:
        pipeline.cancel(again)
        return take_over(*given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(validate.lines, "take_over", cancelled_meanwhile)
        pipeline.validate()
    pipeline.finish(again)
    batch = invariants.check(pipeline, again)
    assert (batch.status, batch.total) == (BatchStatus.CANCELLED, 0)


def test_lines_come_in_pages_where_they_are_more_than_one(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.plan.LINES_AT_ONCE", 2)
    source = pipeline.submit([embedding_line(f"{n}", f"invalid {n}") for n in range(5)])
    pipeline.finish(source, make=lambda: Failing(Counter()))
    again = pipeline.retry(source)
    pipeline.finish(again)
    assert invariants.check(pipeline, again).completed == 5


def test_a_retry_over_the_api_links_both_ways(pipeline: Pipeline) -> None:
    source = with_failures(pipeline)
    resources = pipeline.resources
    with api_over(resources.settings, resources.database, resources.storage) as api:
        with resources.database.transaction() as transaction:
            for table in (Batch, File):
                transaction.execute(update(table).values(project_id=api.project_id))
        shown = show(Prefix.BATCH, source.id)
        with api.http() as http:
            made = http.post(f"/v1/batches/{shown}/retry")
            again = http.post(f"/v1/batches/{shown}/retry")
            before = http.get(f"/v1/batches/{shown}").json()
            running_still = http.post(f"/v1/batches/{made.json()['id']}/retry")
    assert made.status_code == 200
    assert made.json() == again.json()
    assert made.json()["status"] == "validating"
    assert made.json()["halfrate"]["retry_of"] == shown
    assert made.json()["halfrate"]["retried_by"] is None
    assert before["halfrate"]["retried_by"] == made.json()["id"]
    assert before["halfrate"]["retry_of"] is None
    assert running_still.status_code == 409
    assert running_still.headers["x-should-retry"] == "false"
    assert parse(Prefix.BATCH, made.json()["id"]) is not None


def test_only_states_without_a_success_are_taken_over() -> None:
    """`lines.take_over` spells them out in SQL."""
    assert set(LineState) - {LineState.PENDING, LineState.SUCCEEDED} == {
        LineState.FAILED,
        LineState.EXPIRED,
        LineState.CANCELLED,
    }
    assert RequestLine.__tablename__ in str(validate.lines._TAKE_OVER)
