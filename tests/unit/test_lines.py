"""Is every bad line told as CONTRACT.md's table says, and every good one taken as it is?"""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.lines import (
    EMPTY_FILE,
    MAX_CUSTOM_ID,
    LineError,
    ValidLine,
    check_line,
    custom_id_of,
    duplicate,
    too_large,
    too_many_lines,
)

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MISSING = object()


def check(raw: bytes, endpoint: str = EMBED) -> ValidLine | LineError:
    return check_line(raw, line=7, endpoint=endpoint, serves={"m"}.__contains__)


def request(endpoint: str = EMBED, **changes: Any) -> dict[str, Any]:
    """A good request, with keys changed or (MISSING) taken away; `body_x` changes body's x."""
    subject = {CHAT: "messages", EMBED: "input", "/v1/completions": "prompt"}[endpoint]
    made: dict[str, Any] = {
        "custom_id": "a",
        "method": "POST",
        "url": endpoint,
        "body": {"model": "m", subject: [{"role": "user", "content": "x"}]},
    }
    for key, value in changes.items():
        where = made["body"] if key.startswith("body_") else made
        name = key.removeprefix("body_")
        where[name] = value
        if value is MISSING:
            del where[name]
    return made


def error(endpoint: str = EMBED, **changes: Any) -> LineError:
    found = check(orjson.dumps(request(endpoint, **changes)), endpoint)
    assert isinstance(found, LineError)
    assert found.line == 7
    return found


@pytest.mark.parametrize("endpoint", [CHAT, EMBED, "/v1/completions"])
def test_a_good_line_gives_its_custom_id_and_model(endpoint: str) -> None:
    assert check(orjson.dumps(request(endpoint)), endpoint) == ValidLine("a", "m")


@pytest.mark.parametrize(
    "raw", [b"{broken", b"{", b"nul", b'{"a": }', b"'a'", b"{'a': 1}", b"\x01"]
)
def test_what_is_not_json_is_told(raw: bytes) -> None:
    message = "This line is not parseable as valid JSON."
    assert check(raw) == LineError("invalid_json_line", message, None, 7)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * 2_000 + b"]" * 2_000 + b"}", "nested too deeply"),
        (b'{"a": 1} {"b": 2}', "text follows"),
        (b'{"a": 1}x', "text follows"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -' + b"9" * 400 + b"}", "too large"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "too many digits"),
    ],
)
def test_json_that_goes_too_far_is_told_by_how(raw: bytes, named: str) -> None:
    found = check(raw)
    assert isinstance(found, LineError)
    assert (found.code, found.param, found.line) == ("invalid_json_line", None, 7)
    assert named in found.message


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"[1,2]", "an array"),
        (b'"text"', "a string"),
        (b"7", "an integer"),
        (b"7.5", "a number"),
        (b"null", "null"),
        (b"true", "a boolean"),
    ],
)
def test_json_that_is_no_object_is_told_by_what_it_is(raw: bytes, named: str) -> None:
    message = f"This line must be a JSON object, but it is {named}."
    assert check(raw) == LineError("invalid_json_line", message, None, 7)


@pytest.mark.parametrize(
    ("raw", "at"), [(b'{"a": "caf\xe9"}', 10), (b"\xff", 0), (b'"\xed\xa0\x80"', 1)]
)
def test_bytes_that_are_no_utf8_are_told_by_their_offset(raw: bytes, at: int) -> None:
    found = check(raw)
    assert isinstance(found, LineError)
    assert (found.code, found.param) == ("invalid_encoding", None)
    assert f"offset {at} " in found.message


@pytest.mark.parametrize("key", ["custom_id", "method", "url", "body"])
def test_a_missing_key_is_named(key: str) -> None:
    message = f"Missing required parameter: '{key}'."
    assert error(**{key: MISSING}) == LineError("missing_required_parameter", message, key, 7)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (17, "an integer"),
        (1.5, "a number"),
        (None, "null"),
        (True, "a boolean"),
        ([], "an array"),
        ({}, "an object"),
    ],
)
@pytest.mark.parametrize("key", ["custom_id", "method", "url", "body_model"])
def test_a_key_of_the_wrong_type_is_told_by_what_it_is(key: str, value: object, named: str) -> None:
    shown = key.replace("body_", "body.")
    message = f"Invalid type for '{shown}': expected a string, but got {named} instead."
    assert error(**{key: value}) == LineError("invalid_type", message, shown, 7)


@pytest.mark.parametrize("value", ["text", 1, None, [], True])
def test_a_body_that_is_no_object_is_told(value: object) -> None:
    found = error(body=value)
    assert (found.code, found.param) == ("invalid_type", "body")
    assert "expected an object" in found.message


@pytest.mark.parametrize("method", ["GET", "post", "", "DELETE", " POST"])
def test_another_method_than_post_is_told(method: str) -> None:
    found = error(method=method)
    assert (found.code, found.param) == ("invalid_method", "method")


@pytest.mark.parametrize("url", ["v1/embeddings", CHAT, EMBED + "/", "", "https://x/v1/embeddings"])
def test_another_url_than_the_batches_is_told(url: str) -> None:
    message = "The URL provided for this request does not match the batch endpoint."
    assert error(url=url) == LineError("invalid_url", message, "url", 7)


def test_no_model_is_told() -> None:
    expected = ("missing_required_parameter", "Model parameter is required.", "body.model", 7)
    assert error(body_model=MISSING) == LineError(*expected)


@pytest.mark.parametrize("model", ["gpt-99", "", "M", "m "])
def test_a_model_that_is_not_served_is_told(model: str) -> None:
    message = f"The provided model '{model}' is not supported by the Batch API."
    assert error(body_model=model) == LineError("model_not_found", message, "body.model", 7)


@pytest.mark.parametrize(
    ("endpoint", "subject"),
    [(CHAT, "messages"), (EMBED, "input"), ("/v1/completions", "prompt")],
)
@pytest.mark.parametrize("value", [MISSING, None])
def test_a_body_about_nothing_is_told(endpoint: str, subject: str, value: object) -> None:
    message = f"{subject.capitalize()} parameter is required."
    expected = LineError("missing_required_parameter", message, f"body.{subject}", 7)
    assert error(endpoint, **{f"body_{subject}": value}) == expected


def test_streaming_is_told_and_not_streaming_is_fine() -> None:
    message = "Streaming is not supported in the Batch API."
    expected = LineError("streaming_unsupported", message, "body.stream", 7)
    assert error(CHAT, body_stream=True) == expected
    for fine in (False, None):
        line = orjson.dumps(request(CHAT, body_stream=fine))
        assert isinstance(check(line, CHAT), ValidLine)


@pytest.mark.parametrize("length", [0, MAX_CUSTOM_ID + 1, 10_000])
def test_a_custom_id_of_the_wrong_length_is_told_with_the_limit(length: int) -> None:
    found = error(custom_id="é" * length)
    assert (found.code, found.param) == ("invalid_value", "custom_id")
    assert str(MAX_CUSTOM_ID) in found.message
    assert str(length) in found.message


def test_a_custom_id_of_the_most_characters_is_fine() -> None:
    longest = "\U0001f389" * MAX_CUSTOM_ID
    assert check(orjson.dumps(request(custom_id=longest))) == ValidLine(longest, "m")


def test_a_custom_id_that_postgres_cannot_hold_is_told() -> None:
    found = error(custom_id="a\0b")
    assert (found.code, found.param) == ("invalid_value", "custom_id")


@pytest.mark.parametrize("changes", [{"method": "G\0T"}, {"body_model": "m\0"}])
def test_no_message_holds_what_postgres_cannot(changes: dict[str, str]) -> None:
    assert "\0" not in error(**changes).message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"custom_id": "a", "custom_id": "b", "method": "POST"}',
        b'{"custom_id": "a", "method": "POST", "custom_id": "a"}',
        b'{"custom_id": "a", "custom\\u005fid": "b", "method": "POST"}',
        b'{"c\\u0075stom_id": "a", "custom_i\\u0064": "b"}',
    ],
)
def test_a_custom_id_key_that_stands_twice_is_told(raw: bytes) -> None:
    found = check(raw)
    assert isinstance(found, LineError)
    assert (found.code, found.param) == ("invalid_json_line", "custom_id")
    assert "twice" in found.message


def test_the_key_may_stand_again_inside_the_body() -> None:
    made = request(body_user={"custom_id": "z"}, body_input='say "custom_id" A')
    assert check(orjson.dumps(made)) == ValidLine("a", "m")
    assert check(json.dumps(made).replace("A", "\\u0041").encode()) == ValidLine("a", "m")


def test_u0000_inside_a_prompt_is_text() -> None:
    assert check(orjson.dumps(request(body_input="a\0b"))) == ValidLine("a", "m")


@pytest.mark.parametrize("digits", [19, 20, 30, 310, 5_000])
def test_an_integer_of_any_length_never_crashes(digits: int) -> None:
    number = b"9" * digits
    found = check(b'{"custom_id": ' + number + b"}")
    assert isinstance(found, LineError)
    assert found.code in {"invalid_type", "invalid_json_line"}
    good = orjson.dumps(request(body_seed=1)).replace(b'"seed":1', b'"seed":' + number)
    assert isinstance(check(good), ValidLine | LineError)


@given(st.text(min_size=1, max_size=MAX_CUSTOM_ID))
def test_every_legal_custom_id_is_kept_as_it_is(custom_id: str) -> None:
    if "\0" in custom_id:
        return
    escaped = json.dumps(request(custom_id=custom_id)).encode()
    for raw in (orjson.dumps(request(custom_id=custom_id)), escaped):
        assert check(raw) == ValidLine(custom_id, "m")
        assert custom_id_of(raw) == custom_id


@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from(
                [
                    b"{",
                    b"}",
                    b"[",
                    b"]",
                    b'"',
                    b",",
                    b":",
                    b"\\u",
                    b"d800",
                    b"1e999",
                    b"-",
                    b"null",
                    b'"custom_id"',
                    b'"body"',
                    b'"a"',
                    b"9" * 30,
                    b"NaN",
                    b"\xff",
                    b" ",
                    b"\x00",
                ]
            ),
            max_size=30,
        ).map(b"".join),
    )
)
def test_no_line_makes_the_check_raise(raw: bytes) -> None:
    assert isinstance(check(raw), ValidLine | LineError)
    custom_id_of(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["custom_id", "method", "url", "body_model", "body_input", "body_stream"]),
        json_values,
    )
)
def test_no_value_of_any_key_makes_the_check_raise(changes: dict[str, Any]) -> None:
    assert isinstance(check(json.dumps(request(**changes)).encode()), ValidLine | LineError)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"custom_id": 5}', b'{"custom_id": ""}']
)
def test_a_line_without_a_legal_custom_id_has_none(raw: bytes) -> None:
    assert custom_id_of(raw) is None


def test_errors_of_the_whole_file_say_the_limit_and_what_was_found() -> None:
    assert (EMPTY_FILE.code, EMPTY_FILE.line, EMPTY_FILE.param) == ("empty_file", None, None)
    large = too_large(3, 2_000, 1_000)
    assert (large.code, large.line) == ("line_too_large", 3)
    assert "2000" in large.message
    assert "1000" in large.message
    many = too_many_lines(12, 10)
    assert (many.code, many.line) == ("too_many_lines", None)
    assert "12" in many.message
    assert "10" in many.message
    again = duplicate("x", 4)
    assert (again.code, again.param, again.line) == ("duplicate_custom_id", "custom_id", 4)
    assert again.message == (
        "The custom_id 'x' for this request is a duplicate of another request. "
        "The custom_id parameter must be unique for each request in a batch."
    )
