"""Is a whole file checked in one pass, with every bad line told and nothing kept of a bad file?"""

import pytest
from sqlalchemy import select

from service.batch import BatchStatus, ShardState, StageName
from service.db import session
from service.db.models import Batch, File, Stage
from tests.pipeline import Pipeline, embedding_line
from tests.threads import running
from worker import stages, validate
from worker.lease import KeptLease
from worker.resources import Resources


def errors_of(pipeline: Pipeline, data: bytes | list[bytes]) -> list[tuple[int | None, str]]:
    """What validation says of such a file, which it refuses."""
    batch_id = pipeline.submit(data)
    pipeline.validate()
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.FAILED
    assert pipeline.line_rows(batch_id) == []
    assert (batch.total, batch.model) == (0, None)
    return [(error["line"], error["code"]) for error in batch.errors or []]


def test_an_accepted_file_has_its_lines_and_a_plan_to_come(pipeline: Pipeline) -> None:
    good = embedding_line("a")
    batch_id = pipeline.submit(b"\xef\xbb\xbf" + good + b"\r\n\n" + embedding_line("b"))
    pipeline.validate()
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.IN_PROGRESS
    assert batch.in_progress_at is not None
    assert (batch.total, batch.model, batch.errors) == (2, "stub-embed", None)
    assert pipeline.open_stages(batch_id) == [StageName.PLAN]
    first, second = pipeline.line_rows(batch_id)
    assert (first.line, first.byte_offset, first.byte_length) == (1, 3, len(good))
    assert (second.line, second.byte_offset) == (3, 3 + len(good) + 3)


def test_bad_lines_and_duplicates_are_told_together_in_line_order(pipeline: Pipeline) -> None:
    lines = [
        embedding_line("a"),
        b"{",
        embedding_line("a"),
        b"",
        embedding_line("b", model="nobody"),
        embedding_line("a"),
        embedding_line("b"),
    ]
    assert errors_of(pipeline, lines) == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (5, "model_not_found"),
        (6, "duplicate_custom_id"),
        (7, "duplicate_custom_id"),
    ]


def test_the_first_errors_are_kept_and_all_are_counted(pipeline: Pipeline) -> None:
    few = pipeline.having(max_errors=4)
    lines = [embedding_line("same") if n % 2 else b"{" for n in range(40)]
    batch_id = few.submit(lines)
    few.validate()
    batch = few.batch(batch_id)
    assert batch.status is BatchStatus.FAILED
    assert [error["line"] for error in batch.errors or []] == [1, 3, 4, 5]
    assert batch.error_count == 20 + 19


def test_too_many_lines_are_told_with_what_was_found(pipeline: Pipeline) -> None:
    few = pipeline.having(max_lines=10)
    lines = [embedding_line(f"{n}") for n in range(25)]
    assert errors_of(few, [*lines[:20], b"{", *lines[20:]]) == [
        (None, "too_many_lines"),
        (21, "invalid_json_line"),
    ]
    batch_id = few.submit(lines[:10])
    few.validate()
    assert few.batch(batch_id).status is BatchStatus.IN_PROGRESS


def test_a_line_over_the_cap_is_told_and_its_neighbours_are_checked(pipeline: Pipeline) -> None:
    tight = pipeline.having(max_line_bytes=500)
    lines = [embedding_line("a", "x" * 600), b"{", embedding_line("b")]
    assert errors_of(tight, lines) == [(1, "line_too_large"), (2, "invalid_json_line")]


@pytest.mark.parametrize("data", [b"\n", b"\r\n \n\t\n", b"\xef\xbb\xbf"])
def test_a_file_of_blank_lines_is_empty(pipeline: Pipeline, data: bytes) -> None:
    assert errors_of(pipeline, data) == [(None, "empty_file")]


def test_lines_longer_than_a_read_are_taken_whole(pipeline: Pipeline) -> None:
    # The store is read a MiB at a time: these borders fall inside lines.
    lines = [embedding_line(f"{n}", f"{n}" + "é" * 300_000) for n in range(5)]
    batch_id = pipeline.submit(lines)
    pipeline.validate()
    assert [row.byte_length for row in pipeline.line_rows(batch_id)] == [len(x) for x in lines]


def test_a_file_whose_bytes_are_gone_fails_its_batch(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    with pipeline.resources.database.transaction() as transaction:
        batch = transaction.get_one(Batch, batch_id)
        key = transaction.get_one(File, batch.input_file_id).storage_key
    pipeline.resources.storage.delete([key])
    pipeline.validate()
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.FAILED
    assert [error["code"] for error in batch.errors or []] == ["input_file_missing"]


def test_a_message_holds_only_what_can_be_stored(pipeline: Pipeline) -> None:
    lines = [embedding_line("a").replace(b"POST", b"P\\u0000"), embedding_line("b", model="\0")]
    assert errors_of(pipeline, lines) == [(1, "invalid_method"), (2, "model_not_found")]


def test_a_superseded_validation_commits_nothing(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a"), embedding_line("b")])

    def slow(resources: Resources, kept: KeptLease) -> None:
        pipeline.lose_workers()
        pipeline.validate()  # somebody else's attempt
        validate.validate(resources, kept)

    stages.run_ready(pipeline.resources, StageName.VALIDATE, slow)
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.IN_PROGRESS
    assert (batch.total, len(pipeline.line_rows(batch_id))) == (2, 2)
    assert pipeline.open_stages(batch_id) == [StageName.PLAN]


def test_two_validations_at_once_accept_every_file_once(pipeline: Pipeline) -> None:
    ids = [pipeline.submit([embedding_line(f"{n}") for n in range(50)]) for _ in range(6)]
    with running(pipeline.validate, pipeline.validate):
        pass
    pipeline.validate()
    assert {pipeline.batch(one).status for one in ids} == {BatchStatus.IN_PROGRESS}
    assert {len(pipeline.line_rows(one)) for one in ids} == {50}


def test_a_stage_that_raises_is_tried_again_and_holds_up_no_other(pipeline: Pipeline) -> None:
    first, second = (pipeline.submit([embedding_line("a")]) for _ in range(2))

    def odd(resources: Resources, kept: KeptLease) -> None:
        if kept.lease.batch_id == first:
            raise ValueError("made up")
        validate.validate(resources, kept)

    stages.run_ready(pipeline.resources, StageName.VALIDATE, odd)
    assert pipeline.batch(first).status is BatchStatus.VALIDATING
    assert pipeline.batch(second).status is BatchStatus.IN_PROGRESS
    with pipeline.resources.database.transaction() as transaction:
        stage = transaction.scalars(select(Stage).where(Stage.batch_id == first)).one()
        assert (stage.state, stage.failures) == (ShardState.READY, 1)
        assert stage.not_before > session.now(transaction)
    assert pipeline.finish(first).status is BatchStatus.COMPLETED
