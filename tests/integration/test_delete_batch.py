"""Does DELETE take an ended batch with all that was made of it, and nothing else?"""

from collections import Counter
from collections.abc import Iterator
from uuid import UUID

import pytest
from sqlalchemy import func, select

from service.batch import ShardState, StageName
from service.db.models import Batch, File, Part, RequestLine, Shard, Stage, UsageEntry
from service.errors import Conflict
from service.ids import Prefix, show
from tests.integration.api_server import Api, api_over
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Failing
from worker import leftovers, remove


def ended(pipeline: Pipeline, number: int = 4) -> UUID:
    lines = [embedding_line(f"{n}", f"text {n}") for n in range(number)]
    batch_id = pipeline.submit([*lines, embedding_line("bad", "invalid")])
    pipeline.finish(batch_id, make=lambda: Failing(Counter()))
    return batch_id


def rows(pipeline: Pipeline, batch_id: UUID) -> dict[str, int]:
    with pipeline.resources.database.transaction() as transaction:
        return {
            table.__tablename__: transaction.execute(
                select(func.count()).select_from(table).where(table.batch_id == batch_id)
            ).scalar_one()
            for table in (RequestLine, Shard, Part)
        }


def test_rows_and_result_files_go_and_the_input_file_stays(pipeline: Pipeline) -> None:
    batch_id, other = ended(pipeline), ended(pipeline)
    batch = pipeline.batch(batch_id)
    storage = pipeline.resources.storage
    assert len(list(storage.list(f"results/{batch_id.hex}/"))) == 2
    assert pipeline.delete(batch_id)
    pipeline.remove()
    leftovers.sweep_all(pipeline.resources)
    assert rows(pipeline, batch_id) == {"request_lines": 0, "shards": 0, "parts": 0}
    assert list(storage.list(f"results/{batch_id.hex}/")) == []
    assert pipeline.open_stages(batch_id) == []
    with pipeline.resources.database.transaction() as transaction:
        assert transaction.get_one(File, batch.input_file_id).deleted_at is None
        for file_id in (batch.output_file_id, batch.error_file_id):
            assert transaction.get_one(File, file_id).removed_at is not None
    # Of the other batch nothing is missing, and what was used stays in the ledger.
    assert rows(pipeline, other)["request_lines"] == 5
    assert len(list(storage.list(f"results/{other.hex}/"))) == 2
    with pipeline.resources.database.transaction() as transaction:
        used = select(func.count()).where(UsageEntry.batch_id == batch_id)
        assert transaction.execute(used).scalar_one() == 1


def test_nothing_that_a_client_wrote_stays_in_the_row(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([b"no JSON"])
    pipeline.validate()
    with pipeline.resources.database.transaction() as transaction:
        transaction.get_one(Batch, batch_id).metadata_ = {"secret": "plan"}
    assert pipeline.batch(batch_id).errors
    pipeline.delete(batch_id)
    pipeline.remove()
    batch = pipeline.batch(batch_id)
    assert (batch.metadata_, batch.errors) == (None, None)


def test_a_running_batch_is_not_deleted(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a")])
    for step in (pipeline.validate, pipeline.plan, pipeline.drain, pipeline.assemble):
        with pytest.raises(Conflict, match="Cancel it first"):
            pipeline.delete(batch_id)
        step()
    assert pipeline.delete(batch_id)
    assert pipeline.delete(batch_id)  # again is once
    pipeline.remove()
    assert pipeline.delete(batch_id)


def test_a_batch_whose_lines_a_retry_still_needs_is_not_deleted(pipeline: Pipeline) -> None:
    source = ended(pipeline)
    again = pipeline.retry(source)
    with pytest.raises(Conflict, match="retry"):
        pipeline.delete(source)
    pipeline.validate()
    assert pipeline.delete(source)
    pipeline.remove()
    batch = pipeline.finish(again)
    assert (batch.total, batch.completed, batch.retry_of) == (1, 1, source)


def test_lines_go_some_at_a_time_and_a_death_in_between_costs_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = ended(pipeline, 9)
    pipeline.delete(batch_id)
    monkeypatch.setattr(remove, "LINES_AT_ONCE", 3)
    deletes = remove.lines.remove
    calls = iter(range(9))

    def dies(*given: object, **named: object) -> int | None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return deletes(*given, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(remove.lines, "remove", dies)
        with pytest.raises(KeyboardInterrupt):
            pipeline.remove()
    assert rows(pipeline, batch_id)["request_lines"] == 4
    pipeline.lose_workers()
    pipeline.remove()
    assert rows(pipeline, batch_id) == {"request_lines": 0, "shards": 0, "parts": 0}
    with pipeline.resources.database.transaction() as transaction:
        query = select(Stage.state).where(Stage.name == StageName.REMOVE)
        assert transaction.execute(query).scalar_one() is ShardState.DONE


@pytest.fixture
def api(pipeline: Pipeline) -> Iterator[Api]:
    resources = pipeline.resources
    with api_over(resources.settings, resources.database, resources.storage) as made:
        yield made


def test_over_the_api_it_is_gone_and_pages_go_on_behind_it(pipeline: Pipeline, api: Api) -> None:
    mine = Pipeline(pipeline.resources, api.project_id)
    ids = [show(Prefix.BATCH, ended(mine)) for _ in range(3)]
    running = show(Prefix.BATCH, mine.submit([embedding_line("a")]))
    with api.http() as http:
        output = http.get(f"/v1/batches/{ids[1]}").json()["output_file_id"]
        for _ in range(2):
            answer = http.delete(f"/v1/batches/{ids[1]}")
            assert answer.json() == {"id": ids[1], "object": "batch", "deleted": True}
        assert http.get(f"/v1/files/{output}").status_code == 404
        for method, path in (
            ("GET", ""),
            ("GET", "/lines"),
            ("POST", "/cancel"),
            ("POST", "/retry"),
            ("POST", "/pause"),
            ("POST", "/resume"),
        ):
            assert http.request(method, f"/v1/batches/{ids[1]}{path}").status_code == 404
        page = http.get("/v1/batches").json()
        assert [each["id"] for each in page["data"]] == [running, ids[2], ids[0]]
        behind = http.get("/v1/batches", params={"after": ids[1]}).json()
        assert [each["id"] for each in behind["data"]] == [ids[0]]
        refused = http.delete(f"/v1/batches/{running}")
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
