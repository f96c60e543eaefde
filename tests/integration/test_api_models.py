"""Does the API say what it serves, whether it is well, and what to do instead of a live call?"""

import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import openai
import pytest

from service.db.session import Database
from service.settings import Settings
from service.stack.parts import EmbeddedUrls
from service.storage import Storage
from service.wake import Waker
from tests.integration.api_server import STUBS, Api, Server, api_server, app_over, serving


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


def test_models_are_listed_with_what_they_are_for(api: Api) -> None:
    with api.client() as client:
        models = {model.id: model for model in client.models.list()}
        assert client.models.retrieve("stub-chat") == models["stub-chat"]
    assert set(models) == {"stub-embed", "stub-chat"}
    chat = models["stub-chat"]
    assert (chat.object, chat.owned_by) == ("model", "halfrate")
    assert chat.model_extra is not None
    assert chat.model_extra["halfrate"]["kind"] == "generate"
    assert "/v1/chat/completions" in chat.model_extra["halfrate"]["endpoints"]
    assert chat.model_extra["halfrate"]["price"]["output"] == "0.4"


def test_an_unknown_model_is_404(api: Api) -> None:
    with api.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_a_live_embedding_says_how_to_submit_a_batch(api: Api) -> None:
    with api.client(retries=2) as client, pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="stub-embed", input="hello")
    assert caught.value.code == "batch_only"
    for word in ("/v1/files", "/v1/batches", "/v1/embeddings", "'batch'"):
        assert word in caught.value.message


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/moderations",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
    ],
)
def test_every_live_call_is_404_batch_only(api: Api, path: str) -> None:
    with api.http() as http:
        # More than the server reads ahead: an answer must come though nobody reads this body.
        response = http.post(path, content=b"x" * 3_000_000)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "batch_only"
    assert httpx.post(f"{api.url}{path}").status_code == 401


def test_health_needs_no_key(api: Api) -> None:
    live, ready = httpx.get(f"{api.url}/health/live"), httpx.get(f"{api.url}/health/ready")
    assert (live.status_code, live.json()) == (200, {"status": "ok"})
    assert ready.status_code == 200
    assert ready.json() == {
        "status": "ok",
        "parts": {"database": "ok", "broker": "ok", "store": "ok"},
    }


@pytest.mark.parametrize("part", ["database", "broker", "store"])
def test_ready_names_the_part_that_is_away(
    settings: Settings, database: Database, storage: Storage, part: str
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        port = taken.getsockname()[1]
        away = settings.model_copy(
            update={"s3_endpoint_url": f"http://127.0.0.1:{port}"} if part == "store" else {}
        )
        redis = f"redis://127.0.0.1:{port}/0"
        broker = redis if part == "broker" else settings.redis_url.get_secret_value()
        no_database = f"postgresql://nobody@127.0.0.1:{port}/none"
        with (
            closing(Database(no_database, pool=1, application="test")) as gone,
            closing(Storage.from_settings(away)) as store,
            closing(Waker(broker)) as waker,
            serving(
                app_over(settings, gone if part == "database" else database, store, waker)
            ) as url,
        ):
            ready = httpx.get(f"{url}/health/ready", timeout=30)
            assert httpx.get(f"{url}/health/live").status_code == 200
    assert ready.status_code == 503
    assert ready.headers["x-request-id"]
    states = ready.json()["parts"]
    assert states.pop(part) != "ok"
    assert set(states.values()) == {"ok"}


def test_a_part_that_never_answers_does_not_hang_the_question(
    settings: Settings, database: Database, storage: Storage
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # takes, never speaks
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        mute = settings.model_copy(update={"s3_endpoint_url": url})
        with (
            closing(Storage.from_settings(mute)) as store,
            closing(Waker(settings.redis_url.get_secret_value())) as waker,
            serving(app_over(settings, database, store, waker)) as at,
        ):
            ready = httpx.get(f"{at}/health/ready", timeout=30)
    assert ready.status_code == 503
    assert ready.json()["parts"]["store"] != "ok"
