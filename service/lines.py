"""Is a line of an input file a request that can be run? Pure checks, no server, no model.

What is checked here fails the whole file (CONTRACT.md, Validation); every other fault of a body
fails its line alone, when it is run (`service.bodies`).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from service.faults import a_kind

MAX_CUSTOM_ID = 512

# The letters of `custom_id` can be spelled as escapes, all of them \\u005… to \\u007….
_ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")

SUBJECTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "/v1/chat/completions": (("messages",),),
    "/v1/completions": (("prompt",),),
    "/v1/responses": (("input",),),
    "/v1/embeddings": (("input",),),
    "/v1/classify": (("input",),),
    "/v1/moderations": (("input",),),
    "/v1/score": (("text_1", "queries"), ("text_2", "documents")),
    "/v1/rerank": (("query",), ("documents",)),
}
"""What a body is about, by endpoint: the keys it cannot do without beside `model`, each under any
of its names."""


@dataclass(frozen=True, slots=True)
class LineError:
    """One entry of a failed batch's `errors.data`. `line` is 1-based and physical."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class ValidLine:
    """What the service keeps of a good line."""

    custom_id: str
    model: str


Serves = Callable[[str], bool]
"""Whether the model of that name is served for the batch's endpoint."""


def check_line(raw: bytes, *, line: int, endpoint: str, serves: Serves) -> ValidLine | LineError:
    """One line without its line end, which is not blank. Never raises for what the line holds."""
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _unparseable(raw, line, str(error))
    if not isinstance(request, dict):
        return LineError(
            "invalid_json_line",
            f"This line must be a JSON object, but it is {a_kind(request)}.",
            line=line,
        )
    return (
        _doubled_key(raw, line)
        or _check_custom_id(request, line)
        or _check_method(request, line)
        or _check_url(request, line, endpoint)
        or _check_body(request, line, endpoint, serves)
        or ValidLine(custom_id=request["custom_id"], model=request["body"]["model"])
    )


def custom_id_of(raw: bytes) -> str | None:
    """The custom_id of a line that is bad for another reason, so that twins of it are found too."""
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(request, dict) or _check_custom_id(request, 0) is not None:
        return None
    custom_id: str = request["custom_id"]
    return custom_id


def _unparseable(raw: bytes, line: int, reason: str) -> LineError:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return LineError(
            "invalid_encoding",
            f"This line is not valid UTF-8: the byte at offset {error.start} cannot be decoded.",
            line=line,
        )
    return LineError("invalid_json_line", _why_not_json(text, reason), line=line)


def _why_not_json(text: str, reason: str) -> str:
    """The slow parser knows more about what is wrong."""

    def refuse(name: str) -> None:
        raise _Constant(name)

    try:
        json.loads(text, parse_constant=refuse)
    except _Constant as constant:
        return f"This line is not parseable as valid JSON: {constant} is not a JSON value."
    except RecursionError:
        return "This line is not parseable as valid JSON: it is nested too deeply."
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return f"This line is not parseable as valid JSON: text follows at {error.pos}."
        return "This line is not parseable as valid JSON."
    except ValueError:  # an integer of more digits than Python converts
        return "This line is not parseable as valid JSON: a number has too many digits."
    if "infinity" in reason:
        return "This line is not parseable as valid JSON: a number is too large."
    if "surrogate" in reason:
        return "This line is not parseable as valid JSON: a surrogate stands alone."
    return "This line is not parseable as valid JSON: it is nested too deeply."


class _Constant(Exception):
    """NaN or Infinity was found."""


def _doubled_key(raw: bytes, line: int) -> LineError | None:
    # The parser keeps the last of two equal keys, so a doubled custom_id would be answered under
    # one of its two names. Looked for only where the text allows it: counting is cheap.
    if raw.count(b'"custom_id"') < 2 and _ESCAPED_LETTER.search(raw) is None:
        return None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        found["\0"] = sum(1 for key, _ in items if key == "custom_id")
        return found

    try:
        if json.loads(raw, object_pairs_hook=pairs)["\0"] < 2:
            return None
    except (RecursionError, ValueError):  # deeper, or a longer number, than this parser takes
        return LineError("invalid_json_line", _why_not_json(raw.decode(), ""), line=line)
    return LineError(
        "invalid_json_line",
        "This line is not parseable as valid JSON: the key 'custom_id' stands twice.",
        "custom_id",
        line,
    )


def _check_custom_id(request: dict[str, Any], line: int) -> LineError | None:
    if "custom_id" not in request:
        return _missing("custom_id", line)
    custom_id = request["custom_id"]
    if not isinstance(custom_id, str):
        return _wrong_type("custom_id", "a string", custom_id, line)
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = (
            f"Invalid 'custom_id': it must have 1 to {MAX_CUSTOM_ID} characters, "
            f"but this one has {len(custom_id)}."
        )
        return LineError("invalid_value", message, "custom_id", line)
    if "\0" in custom_id:
        return LineError(
            "invalid_value", "Invalid 'custom_id': it must not hold U+0000.", "custom_id", line
        )
    return None


def _check_method(request: dict[str, Any], line: int) -> LineError | None:
    if "method" not in request:
        return _missing("method", line)
    method = request["method"]
    if not isinstance(method, str):
        return _wrong_type("method", "a string", method, line)
    if method != "POST":
        message = f"Invalid method '{_shown(method, 32)}': only POST is supported."
        return LineError("invalid_method", message, "method", line)
    return None


def _check_url(request: dict[str, Any], line: int, endpoint: str) -> LineError | None:
    if "url" not in request:
        return _missing("url", line)
    url = request["url"]
    if not isinstance(url, str):
        return _wrong_type("url", "a string", url, line)
    if url != endpoint:
        message = "The URL provided for this request does not match the batch endpoint."
        return LineError("invalid_url", message, "url", line)
    return None


def _check_body(
    request: dict[str, Any], line: int, endpoint: str, serves: Serves
) -> LineError | None:
    if "body" not in request:
        return _missing("body", line)
    body = request["body"]
    if not isinstance(body, dict):
        return _wrong_type("body", "an object", body, line)
    if "model" not in body:
        return LineError(
            "missing_required_parameter", "Model parameter is required.", "body.model", line
        )
    model = body["model"]
    if not isinstance(model, str):
        return _wrong_type("body.model", "a string", model, line)
    if not serves(model):
        message = f"The provided model '{_shown(model, 128)}' is not supported by the Batch API."
        return LineError("model_not_found", message, "body.model", line)
    for names in SUBJECTS[endpoint]:
        if all(body.get(name) is None for name in names):
            message = f"{names[0].capitalize()} parameter is required."
            return LineError("missing_required_parameter", message, f"body.{names[0]}", line)
    if body.get("stream") is True:
        message = "Streaming is not supported in the Batch API."
        return LineError("streaming_unsupported", message, "body.stream", line)
    return None


def _shown(text: str, most: int) -> str:
    # Errors are kept as JSONB, which holds no U+0000.
    return text[:most].replace("\0", "\\u0000")


def _missing(key: str, line: int) -> LineError:
    message = f"Missing required parameter: '{key}'."
    return LineError("missing_required_parameter", message, key, line)


def _wrong_type(key: str, wanted: str, found: object, line: int) -> LineError:
    message = f"Invalid type for '{key}': expected {wanted}, but got {a_kind(found)} instead."
    return LineError("invalid_type", message, key, line)


def too_large(line: int, found: int, limit: int) -> LineError:
    """The line has more bytes than a line may have."""
    return LineError(
        "line_too_large", f"This line has {found} bytes; at most {limit} are allowed.", line=line
    )


def duplicate(custom_id: str, line: int) -> LineError:
    """The line's custom_id stands on an earlier line too."""
    message = (
        f"The custom_id '{custom_id}' for this request is a duplicate of another request. The "
        "custom_id parameter must be unique for each request in a batch."
    )
    return LineError("duplicate_custom_id", message, "custom_id", line)


EMPTY_FILE = LineError(
    "empty_file",
    "The input file is empty. Please ensure that the batch contains at least one request.",
)


def too_many_lines(found: int, limit: int) -> LineError:
    """The file holds more requests than a batch may have."""
    return LineError(
        "too_many_lines", f"The input file has {found} requests; at most {limit} are allowed."
    )
