"""Does the official client register, change, test and remove webhook endpoints as it expects to?"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest
from openai.types.webhooks import (
    BatchExpiredWebhookEvent,
    WebhookEndpoint,
    WebhookEndpointTestResult,
    WebhookEndpointWithSecret,
)
from sqlalchemy import update

from service.db import webhook_models as tables
from service.db import webhooks
from service.db.models import Right
from service.outbound import Why
from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import STUBS, Api, Server, api_over, api_server
from tests.receiver import receiver

EVERY = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
HOOK = {"name": "CI", "url": "https://example.com/hook", "event_types": EVERY}


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
def client(api: Api) -> Iterator[openai.OpenAI]:
    with api.client() as made:
        yield made


@pytest.fixture
def near(server: Server) -> Iterator[Api]:
    """A server that may call this machine."""
    settings = server.settings.model_copy(update={"webhook_private_addresses": True})
    with api_over(settings, server.database, server.storage) as running:
        yield running


def create(client: openai.OpenAI, **changed: Any) -> WebhookEndpointWithSecret:
    return client.webhooks.create(**{**HOOK, **changed})


def long_ago(api: Api) -> None:
    """Every endpoint was last changed at the epoch."""
    with api.database.transaction() as session:
        epoch = datetime.fromtimestamp(0, UTC)
        session.execute(update(tables.WebhookEndpoint).values(updated_at=epoch))


def test_a_new_endpoint_shows_its_secret_this_once(client: openai.OpenAI) -> None:
    made = create(client)
    assert made.id.startswith("we_")
    assert made.signing_secret.startswith("whsec_")
    shown = client.webhooks.retrieve(made.id)
    assert isinstance(shown, WebhookEndpoint)
    assert shown.to_dict() == {
        "id": made.id,
        "object": "webhook_endpoint",
        "created_at": made.created_at,
        "updated_at": made.created_at,
        "signing_secret_hint": f"whsec_…{made.signing_secret[-4:]}",
        **HOOK,
    }
    without = made.to_dict()
    del without["signing_secret"]
    assert without == shown.to_dict()


def test_the_secret_stands_in_no_other_answer(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    with api.http() as http:
        for path in ("", f"/{made.id}"):
            assert made.signing_secret not in http.get(f"/v1/webhook_endpoints{path}").text
        changed = http.post(f"/v1/webhook_endpoints/{made.id}", json={"name": "x"})
        assert made.signing_secret not in changed.text


def test_event_types_are_listed_and_stand_once(client: openai.OpenAI) -> None:
    assert client.webhooks.event_types.list().to_dict() == {"object": "list", "data": EVERY}
    made = create(client, event_types=["batch.failed", "batch.completed", "batch.failed"])
    assert made.event_types == ["batch.failed", "batch.completed"]


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"url": "http://127.0.0.1/"}, "url", "invalid_value"),
        ({"url": "http://2130706433/"}, "url", "invalid_value"),
        ({"url": "http://[::ffff:169.254.169.254]/latest/meta-data"}, "url", "invalid_value"),
        ({"url": "http://localhost:8000/"}, "url", "invalid_value"),
        ({"url": "http://postgres:5432/"}, "url", "invalid_value"),
        ({"url": "https://me:word@example.com/"}, "url", "invalid_value"),
        ({"url": "ftp://example.com/"}, "url", "invalid_value"),
        ({"url": "https://example.com/" + "a" * 2_048}, "url", "invalid_value"),
        ({"url": "https://example.com/\0"}, "url", "invalid_value"),
        ({"url": 7}, "url", "invalid_type"),
        ({"name": ""}, "name", "invalid_value"),
        ({"name": "a" * 256}, "name", "invalid_value"),
        ({"name": "a\0"}, "name", "invalid_value"),
        ({"event_types": []}, "event_types", "invalid_value"),
        ({"event_types": ["response.completed"]}, "event_types.0", "invalid_value"),
        ({"event_types": "batch.failed"}, "event_types", "invalid_type"),
    ],
)
def test_what_is_wrong_is_named_at_creation_and_at_a_change(
    client: openai.OpenAI, changed: dict[str, Any], param: str, code: str
) -> None:
    made = create(client)
    for call in (
        lambda: create(client, **changed),
        lambda: client.webhooks.update(made.id, **changed),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert (refused.value.param, refused.value.code) == (param, code)
    assert [each.id for each in client.webhooks.list()] == [made.id]


@pytest.mark.parametrize("missing", ["name", "url", "event_types"])
def test_a_missing_field_is_named(api: Api, missing: str) -> None:
    body = {name: value for name, value in HOOK.items() if name != missing}
    with api.http() as http:
        refused = http.post("/v1/webhook_endpoints", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


def test_a_change_changes_what_it_names_and_its_time(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    long_ago(api)
    for changed in (
        {"name": "other"},
        {"url": "https://example.org/"},
        {"event_types": ["batch.failed"]},
    ):
        before = client.webhooks.retrieve(made.id).to_dict()
        after = client.webhooks.update(made.id, **changed)  # type: ignore[arg-type]
        assert after.updated_at is not None
        assert after.updated_at >= made.created_at
        assert after.to_dict() == {**before, **changed, "updated_at": after.updated_at}
        assert client.webhooks.retrieve(made.id) == after


def test_a_change_that_changes_nothing_is_no_change(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    long_ago(api)
    before = client.webhooks.retrieve(made.id)
    assert before.updated_at == 0
    assert client.webhooks.update(made.id) == before
    assert client.webhooks.update(made.id, **HOOK) == before  # type: ignore[arg-type]


def test_a_page_follows_a_page_newest_first(api: Api, client: openai.OpenAI) -> None:
    made = [create(client, name=f"{n}").id for n in range(5)]
    seen = []
    for endpoint in client.webhooks.list(limit=2):
        if len(seen) == 2:
            create(client, name="late")  # newer than the cursor: not seen
        seen.append(endpoint.id)
    assert seen == made[::-1]
    page = client.webhooks.list(limit=2, after=made[1])
    assert [each.id for each in page.data] == [made[0]]
    with api.http() as http:
        raw = http.get("/v1/webhook_endpoints?limit=1").json()
        assert (raw["first_id"], raw["last_id"], raw["has_more"]) == (
            raw["data"][0]["id"],
            raw["data"][0]["id"],
            True,
        )
    for after in ("we_nothing", f"we_{'0' * 32}"):
        with pytest.raises(openai.BadRequestError) as refused:
            client.webhooks.list(after=after)
        assert refused.value.param == "after"


def test_a_deleted_endpoint_is_gone(client: openai.OpenAI) -> None:
    made = create(client)
    gone = client.webhooks.delete(made.id).to_dict()
    assert gone == {"id": made.id, "object": "webhook_endpoint.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.webhooks.delete(made.id)
    assert client.webhooks.list().data == []


def test_another_projects_endpoint_is_not_there(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    with api.client(api.other_key(elsewhere=True)) as other:
        for call in (
            lambda: other.webhooks.retrieve(made.id),
            lambda: other.webhooks.update(made.id, name="mine"),
            lambda: other.webhooks.rotate_secret(made.id),
            lambda: other.webhooks.test(made.id, event_type="batch.failed"),
            lambda: other.webhooks.delete(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        with pytest.raises(openai.BadRequestError):
            other.webhooks.list(after=made.id)
        assert other.webhooks.list().data == []
    assert client.webhooks.retrieve(made.id).name == "CI"


def test_reading_needs_the_right_to_read_and_changing_that_of_an_admin(
    api: Api, client: openai.OpenAI
) -> None:
    made = create(client)
    for right in (Right.READ, Right.SUBMIT):
        with api.client(api.other_key(right)) as lesser:
            assert lesser.webhooks.retrieve(made.id).id == made.id
            assert len(lesser.webhooks.list().data) == 1
            assert lesser.webhooks.event_types.list().data == EVERY
            for call in (
                lambda: create(lesser),
                lambda: lesser.webhooks.update(made.id, name="mine"),
                lambda: lesser.webhooks.rotate_secret(made.id),
                lambda: lesser.webhooks.test(made.id, event_type="batch.failed"),
                lambda: lesser.webhooks.delete(made.id),
            ):
                with pytest.raises(openai.PermissionDeniedError):
                    call()


def test_a_project_has_only_so_many(client: openai.OpenAI) -> None:
    for _ in range(webhooks.MAX_ENDPOINTS):
        made = create(client)
    with pytest.raises(openai.BadRequestError, match="at most") as refused:
        create(client)
    assert refused.value.code == "webhook_endpoint_limit_reached"
    client.webhooks.delete(made.id)
    create(client)


def test_a_rotation_shows_the_new_secret_this_once(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    long_ago(api)
    for keep in (True, False):
        rotated = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=keep)
        assert rotated.signing_secret != made.signing_secret
        assert rotated.signing_secret_hint == f"whsec_…{rotated.signing_secret[-4:]}"
        assert rotated.updated_at is not None
        assert rotated.updated_at >= made.created_at
        assert client.webhooks.retrieve(made.id).signing_secret_hint == rotated.signing_secret_hint
    assert client.webhooks.rotate_secret(made.id).signing_secret_hint is not None
    with api.http() as http:
        assert http.post(f"/v1/webhook_endpoints/{made.id}/rotate_secret").status_code == 200


def test_a_sample_event_is_sent_and_its_answer_told(near: Api) -> None:
    with receiver() as here, near.client() as client:
        made = create(client, url=f"{here.url}/hook")
        here.answers += [200, 418]
        result = client.webhooks.test(made.id, event_type="batch.expired")
        assert isinstance(result, WebhookEndpointTestResult)
        assert result.to_dict() == {
            "object": "webhook_endpoint.test",
            "webhook_endpoint_id": made.id,
            "event_type": "batch.expired",
            "status_code": 200,
            "success": True,
        }
        assert client.webhooks.test(made.id, event_type="batch.failed").status_code == 418
        first = here.received[0]
        event = client.webhooks.unwrap(first.body, first.headers, secret=made.signing_secret)
        assert isinstance(event, BatchExpiredWebhookEvent)
        assert first.headers["webhook-id"] != here.received[1].headers["webhook-id"]
        assert client.webhooks.retrieve(made.id).updated_at == made.updated_at


def test_an_endpoint_that_does_not_answer_a_sample_is_said_to_be(near: Api, api: Api) -> None:
    with near.client() as client:
        with receiver() as here:
            made = create(client, url=here.url)
        with pytest.raises(openai.BadRequestError) as refused:
            client.webhooks.test(made.id, event_type="batch.failed")
        assert refused.value.code == "webhook_endpoint_unreachable"


def test_a_sample_goes_to_no_private_address(near: Api, api: Api) -> None:
    """Registered while private addresses were allowed: each call is checked anew."""
    with receiver() as here:
        with near.client() as client:
            made = create(client, url=here.url)
        with (
            api.client(near.key) as elsewhere,
            pytest.raises(openai.BadRequestError, match="public") as refused,
        ):
            elsewhere.webhooks.test(made.id, event_type="batch.failed")
        assert refused.value.code == "webhook_endpoint_unreachable"
        assert here.received == []


def test_a_sample_of_an_unknown_event_is_refused(api: Api, client: openai.OpenAI) -> None:
    made = create(client)
    with api.http() as http:
        path = f"/v1/webhook_endpoints/{made.id}/test"
        for body in ({"event_type": "batch.eaten"}, {}):
            answer: httpx.Response = http.post(path, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "event_type"


def test_there_are_words_for_every_reason() -> None:
    from service.api.webhooks import NOT_ANSWERED

    assert set(NOT_ANSWERED) == set(Why)
