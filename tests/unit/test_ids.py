"""Are ids unique, ordered, and shown in one way only?"""

import time
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.ids import Prefix, new_id, parse, show


def test_an_id_is_a_uuid_of_version_7() -> None:
    value = new_id()
    assert value.version == 7
    assert value.variant == "specified in RFC 4122"


def test_ids_do_not_repeat() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000


def test_a_later_millisecond_makes_a_larger_id() -> None:
    first = new_id()
    tick = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == tick:
        pass
    assert new_id() > first


@settings(deadline=None)
@given(st.uuids(), st.sampled_from(Prefix))
def test_what_is_shown_parses_to_the_same_id(value: UUID, prefix: Prefix) -> None:
    assert parse(prefix, show(prefix, value)) == value


@settings(deadline=None)
@given(st.text(max_size=80), st.sampled_from(Prefix))
def test_parsing_never_raises_and_takes_only_what_is_shown(text: str, prefix: Prefix) -> None:
    value = parse(prefix, text)
    assert value is None or show(prefix, value) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file-",
        "0190a5d2e7c47a6b8f1e2d3c4b5a6978",
        "batch_0190a5d2e7c47a6b8f1e2d3c4b5a6978",
        "file-0190A5D2E7C47A6B8F1E2D3C4B5A6978",
        "file-0190a5d2-e7c4-7a6b-8f1e-2d3c4b5a6978",
        "file-0190a5d2e7c47a6b8f1e2d3c4b5a697",
        "file-0190a5d2e7c47a6b8f1e2d3c4b5a69780",
        "file-0190a5d2e7c47a6b8f1e2d3c4b5a697\n",
        "file-+190a5d2e7c47a6b8f1e2d3c4b5a6978",
        "file-\u0660190a5d2e7c47a6b8f1e2d3c4b5a6978",
    ],
)
def test_a_lookalike_is_no_file_id(text: str) -> None:
    assert parse(Prefix.FILE, text) is None
