"""Can batches be created, followed, listed and cancelled as the contract says?"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from sqlalchemy import select, update

from service.batch import BatchStatus, ShardState, StageName
from service.db import batches
from service.db.models import Batch, Right, Stage
from service.db.session import now
from service.ids import Prefix, parse
from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import STUBS, Api, Server, api_server

LINES = b'{"custom_id": "a"}\n'


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


@pytest.fixture
def file_id(api: Api) -> str:
    with api.client() as client:
        return client.files.create(file=("a.jsonl", LINES), purpose="batch").id


def _create(api: Api, file_id: str, **more: Any) -> Any:
    with api.client() as client:
        return client.batches.create(
            **{
                "input_file_id": file_id,
                "endpoint": "/v1/embeddings",
                "completion_window": "24h",
                **more,
            }
        )


def _move(api: Api, shown_id: str, *path: BatchStatus) -> None:
    batch_id = parse(Prefix.BATCH, shown_id)
    assert batch_id is not None
    with api.database.transaction() as session:
        for status in path:
            batches.move(session, batch_id, status, now(session))


def test_a_new_batch_is_validating_with_every_key(api: Api, file_id: str) -> None:
    batch = _create(api, file_id, metadata={"team": "tags", "leer": ""})
    assert set(openai.types.Batch.model_fields) <= batch.model_fields_set
    assert batch.status == "validating"
    assert batch.object == "batch"
    assert batch.endpoint == "/v1/embeddings"
    assert batch.input_file_id == file_id
    assert batch.completion_window == "24h"
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.metadata == {"team": "tags", "leer": ""}
    assert batch.request_counts.model_dump() == {"total": 0, "completed": 0, "failed": 0}
    assert batch.usage is None
    assert batch.errors is None
    assert batch.output_file_id is None
    assert batch.halfrate["cost"]["currency"] == "USD"
    with api.client() as client:
        assert client.batches.retrieve(batch.id) == batch


def test_creating_a_batch_makes_its_validate_stage(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    with api.database.transaction() as session:
        (stage,) = session.scalars(
            select(Stage).where(Stage.batch_id == parse(Prefix.BATCH, batch.id))
        )
    assert (stage.name, stage.state) == (StageName.VALIDATE, ShardState.READY)


@pytest.mark.parametrize(("window", "hours"), [("1h", 1), ("168h", 168)])
def test_the_window_sets_the_end(api: Api, file_id: str, window: str, hours: int) -> None:
    batch = _create(api, file_id, completion_window=window)
    assert batch.expires_at == batch.created_at + hours * 3600


def test_how_long_results_are_kept_is_stored(api: Api, file_id: str) -> None:
    _create(api, file_id, output_expires_after={"anchor": "created_at", "seconds": 7200})
    with api.database.transaction() as session:
        assert (
            session.scalar(
                select(Batch.output_expires_after_s).where(Batch.project_id == api.project_id)
            )
            == 7200
        )


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"endpoint": "/v1/images"}, "endpoint", "invalid_value"),
        ({"endpoint": "/v1/moderations"}, "endpoint", "invalid_value"),
        ({"endpoint": "v1/embeddings"}, "endpoint", "invalid_value"),
        ({"endpoint": ""}, "endpoint", "invalid_value"),
        ({"completion_window": "25"}, "completion_window", "invalid_value"),
        ({"metadata": {"tags": ["a"]}}, "metadata.tags", "invalid_type"),
        ({"metadata": {"tags": "a\0b"}}, "metadata.tags", "invalid_value"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"input_file_id": "file-unknown"}, "input_file_id", "invalid_value"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id", "invalid_value"),
        ({"input_file_id": ""}, "input_file_id", "invalid_value"),
        ({"input_file_id": "a\0b"}, "input_file_id", "invalid_value"),
    ],
)
def test_a_wrong_batch_is_400_and_leaves_nothing(
    api: Api, file_id: str, changed: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _create(api, file_id, **changed)
    assert (caught.value.param, caught.value.code) == (param, code)
    with api.client() as client:
        assert client.batches.list().data == []


@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
def test_a_missing_field_is_named(api: Api, file_id: str, name: str) -> None:
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    del body[name]
    with api.http() as http:
        error = http.post("/v1/batches", json=body).json()["error"]
    assert error == {
        "message": f"Missing required parameter: '{name}'.",
        "type": "invalid_request_error",
        "param": name,
        "code": "missing_required_parameter",
    }


def test_a_lone_surrogate_in_metadata_is_400(api: Api, file_id: str) -> None:
    body = (
        f'{{"input_file_id": "{file_id}", "endpoint": "/v1/embeddings",'
        ' "completion_window": "24h", "metadata": {"a": "\\ud800"}}'
    )
    with api.http() as http:
        response = http.post("/v1/batches", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "metadata.a"


def test_metadata_of_any_script_comes_back(api: Api, file_id: str) -> None:
    metadata = {"漢🎈": "ü\u2028\n", "k" * 64: "v" * 512}
    batch = _create(api, file_id, metadata=metadata)
    assert batch.metadata == metadata


def test_a_file_of_another_purpose_is_no_input(api: Api) -> None:
    with api.client() as client:
        picture = client.files.create(file=("a.jsonl", LINES), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        _create(api, picture.id)
    assert caught.value.param == "input_file_id"
    assert "user_data" in caught.value.message


def test_a_deleted_file_is_no_input(api: Api, file_id: str) -> None:
    with api.client() as client:
        client.files.delete(file_id)
    with pytest.raises(openai.BadRequestError) as caught:
        _create(api, file_id)
    assert caught.value.param == "input_file_id"


def test_a_file_of_another_project_is_no_input(api: Api, file_id: str) -> None:
    with (
        api.client(api.other_key(elsewhere=True)) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.batches.create(
            input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"


def test_a_batch_of_another_project_is_not_there(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    with api.client(api.other_key(elsewhere=True)) as client:
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        assert client.batches.list().data == []
        with pytest.raises(openai.BadRequestError):
            client.batches.list(after=batch.id)


@pytest.mark.parametrize(
    "batch_id", ["batch_0", "nonsense", "file-" + "0" * 32, "batch_" + "0" * 32]
)
def test_an_unknown_batch_is_404(api: Api, batch_id: str) -> None:
    with api.client() as client:
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                call(batch_id)
            assert caught.value.code == "not_found"


def test_the_pager_gives_every_batch_once_newest_first_while_batches_are_added(
    api: Api, file_id: str
) -> None:
    before = [_create(api, file_id).id for _ in range(7)]
    with api.client() as client:
        seen = []
        for batch in client.batches.list(limit=2):
            seen.append(batch.id)
            if len(seen) % 3 == 0:
                _create(api, file_id)
    assert seen == before[::-1]


def test_a_page_has_twenty_batches_unless_told_otherwise(api: Api, file_id: str) -> None:
    made = [_create(api, file_id).id for _ in range(21)]
    with api.http() as http:
        page = http.get("/v1/batches").json()
        rest = http.get(f"/v1/batches?after={page['last_id']}").json()
    assert [batch["id"] for batch in page["data"]] == made[:0:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[20], made[1], True)
    assert [batch["id"] for batch in rest["data"]] == made[:1]
    assert rest["has_more"] is False


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "after=nonsense", "after=batch_" + "0" * 32]
)
def test_a_wrong_page_is_400(api: Api, query: str) -> None:
    with api.http() as http:
        response = http.get(f"/v1/batches?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=")[0]


def test_cancelling_is_answered_at_once_and_again(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    with api.client() as client:
        cancelling = client.batches.cancel(batch.id)
        again = client.batches.cancel(batch.id)
    assert cancelling.status == again.status == "cancelling"
    assert cancelling.cancelling_at is not None
    assert again.cancelling_at == cancelling.cancelling_at


def test_an_ended_batch_cannot_be_cancelled(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    _move(api, batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
    with api.http() as http:
        response = http.post(f"/v1/batches/{batch.id}/cancel")
    assert response.status_code == 409
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["message"] == ("Cannot cancel a batch with status 'completed'.")


def test_the_official_client_does_not_retry_a_conflict(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    _move(api, batch.id, BatchStatus.FAILED)
    with api.client(retries=2) as client, pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_a_failed_batch_shows_its_errors(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    batch_id = parse(Prefix.BATCH, batch.id)
    assert batch_id is not None
    errors: list[dict[str, object]] = [
        {"code": "invalid_json_line", "message": "no", "param": None, "line": line}
        for line in range(1, 151)
    ]
    with api.database.transaction() as session:
        batches.fail(session, batch_id, errors=errors, error_count=4_000, now=now(session))
    with api.client() as client:
        shown = client.batches.retrieve(batch.id)
        (listed,) = client.batches.list().data
    assert shown.status == "failed"
    assert shown.errors is not None
    assert shown.errors.object == "list"
    assert shown.errors.data is not None
    assert [error.line for error in shown.errors.data] == list(range(1, 151))
    assert listed.errors is not None
    assert listed.errors.data is not None
    assert len(listed.errors.data) == 100
    assert shown.model_extra is not None
    assert shown.model_extra["halfrate"]["error_count"] == 4_000


def test_an_ended_batch_shows_usage_and_cost(api: Api, file_id: str) -> None:
    batch = _create(api, file_id)
    _move(api, batch.id, BatchStatus.IN_PROGRESS)
    with api.database.transaction() as session:
        session.execute(
            update(Batch)
            .where(Batch.project_id == api.project_id)
            .values(
                total=3,
                completed=2,
                failed=1,
                model="stub-embed",
                input_tokens=1_000_000,
                standard_cost="0.02",
                paid_cost="0.01",
            )
        )
    with api.client() as client:
        assert client.batches.retrieve(batch.id).usage is None
        _move(api, batch.id, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
        ended = client.batches.retrieve(batch.id)
    assert ended.model == "stub-embed"
    assert ended.usage is not None
    assert ended.usage.total_tokens == 1_000_000
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert ended.model_extra is not None
    assert ended.model_extra["halfrate"]["cost"] == {
        "currency": "USD",
        "standard": "0.02",
        "paid": "0.01",
        "saved": "0.01",
    }


def test_a_submitting_key_may_create_and_cancel(api: Api, file_id: str) -> None:
    with api.client(api.other_key(Right.SUBMIT)) as client:
        batch = client.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert client.batches.cancel(batch.id).status == "cancelling"
