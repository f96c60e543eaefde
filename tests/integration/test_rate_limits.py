"""Is a key held to its requests a minute, and is nobody held up when the counter is away?"""

import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import openai
import pytest

from service.api.rate import REST_S, RateLimiter
from service.clock import monotonic
from service.db.models import Right
from service.db.session import Database
from service.ids import new_id
from service.settings import Settings
from service.storage import Storage
from tests.integration.api_server import Api, api_over

LIMIT = 4
HEADERS = (
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)


@pytest.fixture
def api(settings: Settings, database: Database, storage: Storage) -> Iterator[Api]:
    limited = settings.model_copy(update={"requests_per_minute": LIMIT})
    with api_over(limited, database, storage) as running:
        yield running


def test_every_reply_says_what_is_left_and_the_last_when_to_come_again(api: Api) -> None:
    with api.http() as http:
        replies = [
            http.get("/v1/models"),
            http.get("/v1/files/file-1"),
            http.get("/v1/files?limit=0"),
            http.post("/v1/embeddings", json={}),
        ]
        refused = http.get("/v1/models")
    assert [reply.status_code for reply in replies] == [200, 404, 400, 404]
    assert [reply.headers[HEADERS[0]] for reply in replies] == [str(LIMIT)] * LIMIT
    assert [reply.headers[HEADERS[1]] for reply in replies] == ["3", "2", "1", "0"]
    for reply in replies:
        assert 0 < int(reply.headers[HEADERS[2]].removesuffix("s")) <= 60
        assert "retry-after" not in reply.headers
    assert refused.status_code == 429
    assert refused.headers[HEADERS[1]] == "0"
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert "x-should-retry" not in refused.headers
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert str(LIMIT) in error["message"]


def test_the_official_client_knows_it_for_what_it_is(api: Api) -> None:
    with api.client() as client:
        for _ in range(LIMIT):
            client.models.list()
        with pytest.raises(openai.RateLimitError):
            client.models.list()


def test_each_key_has_its_own_count(api: Api) -> None:
    with api.http() as one, api.http(api.other_key(Right.READ)) as other:
        for _ in range(LIMIT + 1):
            last = one.get("/v1/models")
        assert last.status_code == 429
        assert other.get("/v1/models").headers[HEADERS[1]] == str(LIMIT - 1)


def test_a_lacking_right_counts_and_a_wrong_key_does_not(api: Api) -> None:
    with api.http(api.other_key(Right.READ)) as reader, api.http("sk-hr-no") as nobody:
        refused = reader.delete("/v1/files/file-1")
        assert refused.status_code == 403
        assert refused.headers[HEADERS[1]] == str(LIMIT - 1)
        assert HEADERS[0] not in nobody.get("/v1/models").headers


def test_health_is_never_limited(api: Api) -> None:
    for _ in range(LIMIT * 3):
        reply = httpx.get(f"{api.url}/health/live", headers={"authorization": f"Bearer {api.key}"})
        assert reply.status_code == 200
        assert HEADERS[0] not in reply.headers


def test_without_the_setting_nothing_is_counted(
    settings: Settings, database: Database, storage: Storage
) -> None:
    with api_over(settings, database, storage) as unlimited, unlimited.http() as http:
        assert HEADERS[0] not in http.get("/v1/models").headers


def test_all_processes_count_together(settings: Settings) -> None:
    url, key = settings.redis_url.get_secret_value(), new_id()
    with (
        closing(RateLimiter(url, per_minute=3, clock=monotonic)) as one,
        closing(RateLimiter(url, per_minute=3, clock=monotonic)) as other,
    ):
        taken = [limiter.take(key) for limiter in (one, other, one, other)]
    assert [each.granted for each in taken if each is not None] == [True, True, True, False]


def test_a_counter_that_is_away_lets_all_pass_and_is_left_alone_for_a_while(
    settings: Settings,
) -> None:
    now, key = 0.0, new_id()
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    listener.setblocking(False)
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    with closing(listener), closing(RateLimiter(url, per_minute=1, clock=lambda: now)) as limiter:
        assert [limiter.take(key) for _ in range(50)] == [None] * 50
        assert _accepted(listener) == 1
        now = REST_S
        assert limiter.take(key) is None
        assert _accepted(listener) == 1


def test_a_server_without_its_counter_serves(
    settings: Settings, database: Database, storage: Storage
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        away = settings.model_copy(
            update={
                "requests_per_minute": 1,
                "redis_url": type(settings.redis_url)(
                    f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
                ),
            }
        )
        with api_over(away, database, storage) as api, api.http() as http:
            replies = [http.get("/v1/models") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert HEADERS[0] not in replies[0].headers


def _accepted(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1
