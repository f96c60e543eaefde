"""Can a user see which line stands where, how often it was tried, and what went wrong?"""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest

from service.ids import Prefix, parse_line, show, show_line
from tests.integration.api_server import Api, api_over
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Failing


@pytest.fixture
def api(pipeline: Pipeline) -> Iterator[Api]:
    resources = pipeline.resources
    with api_over(resources.settings, resources.database, resources.storage) as made:
        yield made


@pytest.fixture
def mine(pipeline: Pipeline, api: Api) -> Pipeline:
    return Pipeline(pipeline.resources, api.project_id)


def lines_of(http: httpx.Client, batch_id: UUID, **asked: Any) -> httpx.Response:
    return http.get(f"/v1/batches/{show(Prefix.BATCH, batch_id)}/lines", params=asked)


def tried_once(pipeline: Pipeline) -> UUID:
    """One line of each kind: answered, refused, to be tried again."""
    texts = ("fine", "invalid", "out_of_memory")
    lines = [embedding_line(f"ü{text}", text) for text in texts]
    batch_id = pipeline.submit(b"\n" + b"\n".join(lines))
    pipeline.validate()
    assert pipeline.batch(batch_id).total == 3
    pipeline.plan()
    pipeline.drain(make=lambda: Failing(Counter()))
    return batch_id


def test_every_line_tells_where_it_stands(mine: Pipeline, api: Api) -> None:
    batch_id = tried_once(mine)
    with api.http() as http:
        page = lines_of(http, batch_id).json()
    again = page["data"][2]
    assert again.pop("next_try_at") is not None
    assert page["data"] == [
        {
            "id": "line_2",
            "object": "batch.line",
            "line": 2,
            "custom_id": "üfine",
            "status": "succeeded",
            "attempts": 1,
            "next_try_at": None,
            "status_code": 200,
            "error_code": None,
        },
        {
            "id": "line_3",
            "object": "batch.line",
            "line": 3,
            "custom_id": "üinvalid",
            "status": "failed",
            "attempts": 1,
            "next_try_at": None,
            "status_code": 400,
            "error_code": "invalid_value",
        },
        {
            "id": "line_4",
            "object": "batch.line",
            "line": 4,
            "custom_id": "üout_of_memory",
            "status": "pending",
            "attempts": 1,
            "status_code": None,
            "error_code": "out_of_memory",
        },
    ]
    del page["data"]
    assert page == {
        "object": "list",
        "first_id": "line_2",
        "last_id": "line_4",
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("status", "found"),
    [("succeeded", [2]), ("failed", [3]), ("pending", [4]), ("expired", []), ("cancelled", [])],
)
def test_one_status_alone(mine: Pipeline, api: Api, status: str, found: list[int]) -> None:
    batch_id = tried_once(mine)
    with api.http() as http:
        page = lines_of(http, batch_id, status=status).json()
    assert [line["line"] for line in page["data"]] == found


def test_what_never_ran_is_found_too(mine: Pipeline, api: Api) -> None:
    batch_id = tried_once(mine)
    mine.expire(batch_id)
    with api.http() as http:
        (line,) = lines_of(http, batch_id, status="expired").json()["data"]
    assert (line["error_code"], line["next_try_at"]) == ("out_of_memory", None)


def test_pages_give_every_line_once_in_input_order(mine: Pipeline, api: Api) -> None:
    batch_id = mine.submit([embedding_line(f"{n}", "a text") for n in range(7)])
    mine.validate()
    seen: list[str] = []
    asked: dict[str, Any] = {"limit": 3, "status": "pending"}
    with api.http() as http:
        while True:
            page = lines_of(http, batch_id, **asked).json()
            seen += [line["custom_id"] for line in page["data"]]
            if not page["has_more"]:
                break
            asked["after"] = page["last_id"]
    assert seen == [f"{n}" for n in range(7)]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("status", "unheard"),
        ("limit", 0),
        ("limit", 1001),
        ("after", "line_9"),
        ("after", "2"),
        ("after", "line_02"),
        ("after", "line_²"),
        ("after", "line_99999999999"),
        ("after", "batch_" + "0" * 32),
    ],
)
def test_a_wrong_page_is_400(mine: Pipeline, api: Api, param: str, value: object) -> None:
    batch_id = tried_once(mine)
    with api.http() as http:
        answer = lines_of(http, batch_id, **{param: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_before_and_without_validation_there_are_none(mine: Pipeline, api: Api) -> None:
    new, refused = mine.submit([embedding_line("a")]), mine.submit([b"no JSON"])
    with api.http() as http:
        assert lines_of(http, new).json()["data"] == []
        mine.validate()
        assert lines_of(http, refused).json()["data"] == []
        assert len(lines_of(http, new).json()["data"]) == 1


@pytest.mark.parametrize("line", [1, 17, 999_999_999])
def test_a_line_is_known_by_its_number(line: int) -> None:
    assert parse_line(show_line(line)) == line
