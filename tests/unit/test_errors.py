"""Does every error say what the contract wants of it?"""

import json
from collections.abc import Iterator

import pytest

from service.api.errors import error_response, from_service
from service.errors import (
    BadRequest,
    BatchOnly,
    Conflict,
    Forbidden,
    KeyReused,
    NotFound,
    RateLimited,
    ServiceError,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
)

ALL = [
    (BadRequest("no"), 400, "invalid_request_error", None),
    (
        BadRequest("no", param="x", code="invalid_value"),
        400,
        "invalid_request_error",
        "invalid_value",
    ),
    (Unauthenticated("no"), 401, "invalid_request_error", "invalid_api_key"),
    (Forbidden("no"), 403, "permission_error", "insufficient_permissions"),
    (NotFound("no"), 404, "invalid_request_error", "not_found"),
    (BatchOnly("no"), 404, "invalid_request_error", "batch_only"),
    (TooSlow("no"), 408, "invalid_request_error", "request_timeout"),
    (Conflict("no"), 409, "invalid_request_error", "conflict"),
    (KeyReused("no"), 409, "invalid_request_error", "idempotency_key_reused"),
    (TooLarge("no"), 413, "invalid_request_error", "file_too_large"),
    (RateLimited("no", retry_after=7), 429, "rate_limit_error", "rate_limit_exceeded"),
    (Unavailable("no"), 503, "server_error", "service_unavailable"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ALL)
def test_an_error_has_status_and_all_four_keys(
    error: ServiceError, status: int, kind: str, code: str | None
) -> None:
    response = from_service(error)
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {
        "error": {"message": "no", "type": kind, "param": error.param, "code": code}
    }


def test_every_error_class_is_in_the_table() -> None:
    assert set(_below(ServiceError)) <= {type(error) for error, *_ in ALL} | {_unsatisfiable()}


def test_a_conflict_is_not_retried_by_the_official_client() -> None:
    assert from_service(Conflict("no")).headers["x-should-retry"] == "false"


@pytest.mark.parametrize("error", [RateLimited("no", retry_after=7), Unavailable("no")])
def test_an_error_that_waiting_cures_says_how_long(error: ServiceError) -> None:
    assert 0 < int(from_service(error).headers["retry-after"]) <= 120


def test_a_missing_key_is_challenged() -> None:
    assert from_service(Unauthenticated("no")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("text", ["\ud800", "\0", "\u2028", 'a"b\\c\n', "ü漢🎈"])
def test_no_text_of_a_client_breaks_the_answer(text: str) -> None:
    response = error_response(400, text, kind="invalid_request_error", param=text)
    assert json.loads(bytes(response.body))["error"]["message"] == text


def _below(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def _unsatisfiable() -> type[ServiceError]:
    from service.api.ranges import Unsatisfiable

    return Unsatisfiable
