"""Can the official client, sync and async, tell this service from the reference?

The acceptance script: all of it runs with both clients. The stages of the batches run by hand.
"""

import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from starlette.types import Receive, Scope, Send

from service import ids
from service.db.models import Right
from service.wake import Waker
from tests.integration.api_server import Api, Server, app_over, serving
from tests.integration.sdk import Connect, connecting, extras
from tests.pipeline import Pipeline, chat_line, embedding_line
from worker.resources import Resources


class Counted:
    """An app that counts its requests by method and path."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests[scope["method"], scope["path"]] += 1
        await self._app(scope, receive, send)


@pytest.fixture
def app(resources: Resources) -> Iterator[Counted]:
    settings = resources.settings
    with closing(Waker(settings.redis_url.get_secret_value())) as waker:
        yield Counted(app_over(settings, resources.database, resources.storage, waker))


@pytest.fixture
def server(resources: Resources, app: Counted) -> Iterator[Server]:
    with serving(app) as url:
        yield Server(url, resources.settings, resources.database, resources.storage)


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


@pytest.fixture
def stages(resources: Resources, api: Api) -> Pipeline:
    return Pipeline(resources, api.project_id)


@pytest.fixture(params=[False, True], ids=["OpenAI", "AsyncOpenAI"])
def connect(request: pytest.FixtureRequest, api: Api) -> Iterator[Connect]:
    with connecting(api.url, asynchronous=request.param) as made:
        yield made


@pytest.fixture
def client(connect: Connect, api: Api) -> Any:
    return connect(api.key)


def _upload(client: Any, *lines: bytes) -> str:
    data = b"\n".join(lines or [embedding_line("a")])
    file_id: str = client.files.create(file=("a.jsonl", data), purpose="batch").id
    return file_id


def _submit(client: Any, *lines: bytes, endpoint: str = "/v1/embeddings", **more: Any) -> Any:
    return client.batches.create(
        input_file_id=_upload(client, *lines),
        endpoint=endpoint,
        completion_window="24h",
        **more,
    )


def test_a_file_goes_up_is_shown_read_and_deleted(client: Any) -> None:
    made = client.files.create(
        file=io.BytesIO(b"{}\n"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.object, made.bytes, made.status) == ("file", 3, "processed")
    assert made.expires_at == made.created_at + 3600
    assert list(extras(made)) == []
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"{}\n"
    assert [file.id for file in client.files.list(purpose="user_data")] == [made.id]
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "file", True)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert list(client.files.list()) == []


def test_files_are_iterated_to_the_end_while_files_are_added(client: Any) -> None:
    before = [_upload(client) for _ in range(5)]
    seen = []
    for file in client.files.list(limit=2):
        seen.append(file.id)
        _upload(client)
    assert seen == before[::-1]
    in_order = client.files.list(limit=2, order="asc", purpose="batch")
    assert [file.id for file in in_order][:5] == before


def test_batches_are_iterated_to_the_end_while_batches_are_added(client: Any) -> None:
    before = [_submit(client).id for _ in range(5)]
    seen = []
    for batch in client.batches.list(limit=2):
        seen.append(batch.id)
        _submit(client)
    assert seen == before[::-1]


def test_a_range_of_a_file_is_read(client: Any) -> None:
    file = client.files.create(file=("a.jsonl", b"0123456789\n"), purpose="batch")
    headers = {"Range": "bytes=2-4"}
    reply = client.files.content(file.id, extra_headers=headers)
    assert reply.read() == b"234"
    assert reply.response.status_code == 206
    assert reply.response.headers["content-range"] == "bytes 2-4/11"


def test_a_batch_of_embeddings_goes_all_the_way(client: Any, stages: Pipeline) -> None:
    lines = [embedding_line("a", "one text"), embedding_line("b", ""), embedding_line("c", "more")]
    made = _submit(client, *lines, metadata={"who": "me"})
    assert (made.status, made.usage, made.metadata) == ("validating", None, {"who": "me"})
    assert (made.request_counts.total, made.output_file_id) == (0, None)
    stages.run()
    batch = client.batches.retrieve(made.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert batch.model == "stub-embed"
    usage = batch.usage
    assert usage.input_tokens > usage.input_tokens_details.cached_tokens >= 0
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert usage.total_tokens == usage.input_tokens
    for at in ("created_at", "in_progress_at", "finalizing_at", "completed_at", "expires_at"):
        assert isinstance(getattr(batch, at), int)
    assert batch.failed_at is batch.expired_at is batch.cancelling_at is batch.cancelled_at is None
    output = _lines(client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["a", "c"]
    embeddings = openai.types.CreateEmbeddingResponse.model_validate(output[0]["response"]["body"])
    assert list(extras(embeddings)) == []
    (error,) = _lines(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("b", 400)
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_a_batch_of_chats_goes_all_the_way(client: Any, stages: Pipeline) -> None:
    made = _submit(client, chat_line("a", max_tokens=3), endpoint="/v1/chat/completions")
    stages.run("stub-chat")
    batch = client.batches.retrieve(made.id)
    assert batch.status == "completed"
    assert batch.usage.output_tokens == 3
    (line,) = _lines(client, batch.output_file_id)
    answer = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert list(extras(answer)) == []


def test_a_batch_has_one_key_more_than_the_reference(client: Any, stages: Pipeline) -> None:
    made = _submit(client)
    assert list(extras(made)) == ["halfrate"]
    stages.run()
    assert list(extras(client.batches.retrieve(made.id))) == ["halfrate"]
    assert [list(extras(batch)) for batch in client.batches.list()] == [["halfrate"]]


def test_a_failed_batch_says_why_line_by_line(client: Any, stages: Pipeline) -> None:
    made = _submit(client, embedding_line("a"), b"{", embedding_line("a"))
    stages.run()
    batch = client.batches.retrieve(made.id)
    assert (batch.status, batch.usage, batch.request_counts.total) == ("failed", None, 0)
    assert batch.errors.object == "list"
    told = [(each.code, each.param, each.line) for each in batch.errors.data]
    assert told == [("invalid_json_line", None, 2), ("duplicate_custom_id", "custom_id", 3)]
    assert list(extras(batch)) == ["halfrate"]


def test_a_batch_is_cancelled_and_cancelled_again(client: Any, stages: Pipeline) -> None:
    made = _submit(client)
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    stages.run()
    assert client.batches.cancel(made.id).status == "cancelled"


def test_a_conflict_is_told_once(client: Any, stages: Pipeline, app: Counted) -> None:
    made = _submit(client)
    stages.run()
    with pytest.raises(openai.ConflictError) as raised:
        client.batches.cancel(made.id)
    assert "Cannot cancel a batch with status 'completed'." in raised.value.message
    # The client would have tried twice more, after a while each.
    assert app.requests["POST", f"/v1/batches/{made.id}/cancel"] == 1


def test_what_belongs_to_another_project_is_not_found(
    connect: Connect, client: Any, api: Api, stages: Pipeline
) -> None:
    batch = _submit(client)
    stages.run()
    output = client.batches.retrieve(batch.id).output_file_id
    stranger = connect(api.other_key(elsewhere=True))
    for ask in (
        lambda: stranger.batches.retrieve(batch.id),
        lambda: stranger.batches.cancel(batch.id),
        lambda: stranger.files.retrieve(output),
        lambda: stranger.files.content(output),
        lambda: stranger.files.delete(output),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert raised.value.code == "not_found"
    assert list(stranger.files.list()) == list(stranger.batches.list()) == []


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"endpoint": "/v1/images"}, "endpoint", "invalid_value"),
        ({"completion_window": "1w"}, "completion_window", "invalid_value"),
        ({"input_file_id": "file-no"}, "input_file_id", "invalid_value"),
        ({"metadata": {"tags": ["a"]}}, "metadata.tags", "invalid_type"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        ({"input_file_id": openai.omit}, "input_file_id", "missing_required_parameter"),
    ],
)
def test_a_wrong_batch_is_a_bad_request_that_names_the_fault(
    client: Any, more: dict[str, Any], param: str, code: str
) -> None:
    right = {
        "input_file_id": _upload(client),
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    with pytest.raises(openai.BadRequestError) as raised:
        client.batches.create(**{**right, **more})
    assert (raised.value.param, raised.value.code) == (param, code)
    assert raised.value.type == "invalid_request_error"
    assert (raised.value.request_id or "").startswith("req_")


def test_a_wrong_file_is_a_bad_request_that_names_the_fault(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.files.create(file=("a.txt", b"{}"), purpose="batch")
    assert (raised.value.param, raised.value.code) == ("file", "invalid_file_format")
    assert "Invalid file format for Batch API. Must be .jsonl" in raised.value.message


def test_a_wrong_key_is_an_authentication_error(connect: Connect) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        connect("sk-hr-wrong").models.list()
    assert raised.value.code == "invalid_api_key"


def test_a_lacking_right_is_permission_denied(connect: Connect, api: Api) -> None:
    reader = connect(api.other_key(Right.READ))
    assert list(reader.batches.list()) == []
    with pytest.raises(openai.PermissionDeniedError) as raised:
        _upload(reader)
    assert raised.value.code == "insufficient_permissions"


def test_models_are_listed_and_shown(client: Any) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {"stub-embed", "stub-chat"} <= set(listed)
    shown = client.models.retrieve("stub-chat")
    assert shown == listed["stub-chat"]
    assert (shown.object, list(extras(shown))) == ("model", ["halfrate"])
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("nothing")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/embeddings", lambda c: c.embeddings.create(model="stub-embed", input="a")),
        (
            "/v1/chat/completions",
            lambda c: c.chat.completions.create(
                model="stub-chat", messages=[{"role": "user", "content": "a"}]
            ),
        ),
        ("/v1/responses", lambda c: c.responses.create(model="stub-chat", input="a")),
        ("/v1/completions", lambda c: c.completions.create(model="stub-chat", prompt="a")),
        ("/v1/moderations", lambda c: c.moderations.create(input="a")),
    ],
)
def test_a_live_call_says_how_to_submit_a_batch(client: Any, path: str, ask: Any) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        ask(client)
    assert raised.value.code == "batch_only"
    assert path in raised.value.message
    assert "/v1/batches" in raised.value.message


def test_every_reply_can_be_found_in_the_log(client: Any) -> None:
    made = _submit(client)
    replies = [made, client.batches.retrieve(made.id), client.files.retrieve(made.input_file_id)]
    names = {reply._request_id for reply in replies}
    assert len(names) == 3
    assert all(name.startswith(ids.Prefix.REQUEST) for name in names)


def _lines(client: Any, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
