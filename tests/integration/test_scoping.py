"""Does every route ask for a key, for the right it needs, and keep projects apart?

The routes come from the OpenAPI document: a new one is tested as soon as it is there.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from service.db.models import Right
from service.stack.parts import EmbeddedUrls
from tests.examples_of_schemas import body_of
from tests.integration.api_objects import MAKERS, file
from tests.integration.api_server import STUBS, Api, Server, api_server

NOBODYS = "0" * 32
"""The digits of an id that no object has."""

RANKS = list(Right)


OF_ALL = {"model_id"}
"""Parameters that name what belongs to no project."""


class Route(NamedTuple):
    """An operation of the document."""

    method: str
    path: str
    operation: dict[str, Any]
    document: dict[str, Any]

    @property
    def shown(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def parameter(self) -> str | None:
        """The path's parameter that names an object of a project."""
        named = [name for name in re.findall(r"{(\w+)}", self.path) if name not in OF_ALL]
        assert len(named) <= 1, f"{self.shown}: which of the ids says whose it is?"
        return named[0] if named else None

    @property
    def role(self) -> Right | None:
        """The right that its key needs."""
        roles = [role for scheme in self.operation.get("security", []) for role in scheme.values()]
        return max((Right(r) for each in roles for r in each), key=RANKS.index, default=None)

    def ask(self, http: httpx.Client, object_id: str = "x") -> httpx.Response:
        path = re.sub(r"{\w+}", object_id, self.path)
        return http.request(self.method, path, **body_of(self.document, self.operation))


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


@pytest.fixture(scope="module")
def routes(server: Server) -> list[Route]:
    document = httpx.get(f"{server.url}/openapi.json").json()
    return [
        Route(method.upper(), path, operation, document)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def test_every_route_but_health_and_metrics_asks_for_a_key(api: Api, routes: list[Route]) -> None:
    assert [route.shown for route in routes if route.role is None] == [
        "GET /health/live",
        "GET /health/ready",
        "GET /metrics",
    ]
    with httpx.Client(base_url=api.url) as nobody:
        for route in routes:
            if route.role is not None:
                answer = route.ask(nobody)
                assert answer.status_code == 401, route.shown
                assert answer.headers["www-authenticate"] == "Bearer", route.shown


def test_every_route_refuses_a_key_of_a_lesser_right(api: Api, routes: list[Route]) -> None:
    lesser = {
        Right.SUBMIT: api.other_key(Right.READ),
        Right.ADMIN: api.other_key(Right.SUBMIT),
    }
    tried = 0
    for route in routes:
        if route.role in lesser:
            with api.http(lesser[route.role]) as http:
                answer = route.ask(http)
            assert answer.status_code == 403, route.shown
            assert answer.json()["error"]["type"] == "permission_error", route.shown
            tried += 1
    assert tried


def test_what_changes_something_needs_more_than_reading(routes: list[Route]) -> None:
    reading = {r.shown for r in routes if r.method != "GET" and r.role is Right.READ}
    live = {r.shown for r in routes if "Live calls" in r.operation["tags"]}
    assert reading == live


def test_no_route_knows_an_object_of_another_project(
    server: Server, api: Api, routes: list[Route]
) -> None:
    theirs = server.project()
    tried = set()
    for route in routes:
        if route.parameter is None:
            continue
        make = MAKERS.get(route.parameter)
        assert make is not None, f"{route.shown}: how is one made? Tell MAKERS."
        with theirs.http() as owner, api.http() as stranger:
            object_id = make(owner)
            unknown = object_id[: -len(NOBODYS)] + NOBODYS
            refused, missing = route.ask(stranger, object_id), route.ask(stranger, unknown)
            assert refused.status_code == 404, f"{route.shown}: {refused.text}"
            # The answer does not tell either that there is such an object elsewhere.
            told = refused.json()["error"]
            told["message"] = told["message"].replace(object_id, unknown)
            assert told == missing.json()["error"], route.shown
            # The owner's own request shows that the id was good.
            assert route.ask(owner, object_id).status_code != 404, route.shown
        tried.add(route.parameter)
    assert {"file_id", "batch_id"} <= tried


def test_no_list_goes_on_after_an_object_of_another_project(
    server: Server, api: Api, routes: list[Route]
) -> None:
    theirs = server.project()
    tried = 0
    for route in routes:
        parameters = {p["name"] for p in route.operation.get("parameters", [])}
        if route.method != "GET" or "after" not in parameters or route.parameter is not None:
            continue
        inside = re.compile(re.escape(route.path) + r"/{(\w+)}")
        (name,) = {m[1] for r in routes if (m := inside.fullmatch(r.path))}
        with theirs.http() as owner, api.http() as stranger:
            after = MAKERS[name](owner)
            refused = stranger.get(route.path, params={"after": after})
            assert refused.status_code == 400, route.shown
            assert refused.json()["error"]["param"] == "after", route.shown
            assert owner.get(route.path, params={"after": after}).status_code == 200, route.shown
            assert stranger.get(route.path).json()["data"] == [], route.shown
        tried += 1
    assert tried


def test_a_batch_cannot_read_a_file_of_another_project(server: Server, api: Api) -> None:
    with server.project().http() as owner, api.http() as stranger:
        answer = stranger.post(
            "/v1/batches",
            json={
                "input_file_id": file(owner),
                "endpoint": "/v1/embeddings",
                "completion_window": "24h",
            },
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input_file_id"
