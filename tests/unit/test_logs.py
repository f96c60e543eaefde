"""Is a log line one JSON object with its fields, whoever wrote it?"""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from service import logs


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    quieted = {
        name: (logging.getLogger(name).level, logging.getLogger(name).propagate)
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "boto3", "botocore", "urllib3",
                     "python_multipart", "httpx", "httpcore")
    }  # fmt: skip
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, (old_level, propagate) in quieted.items():
        logging.getLogger(name).setLevel(old_level)
        logging.getLogger(name).propagate = propagate


def _lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_fields() -> None:
    out = io.StringIO()
    logs.configure("INFO", stream=out)
    with structlog.contextvars.bound_contextvars(request_id="req_1"):
        structlog.get_logger("service.x").info("shard settled", shard=7)
    (line,) = _lines(out)
    assert line.pop("timestamp")
    assert line == {
        "event": "shard settled",
        "shard": 7,
        "request_id": "req_1",
        "level": "info",
        "logger": "service.x",
    }


def test_a_library_s_record_looks_alike() -> None:
    out = io.StringIO()
    logs.configure("INFO", stream=out)
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    (line,) = _lines(out)
    assert (line["event"], line["level"], line["logger"]) == ("port 80", "warning", "uvicorn.error")


def test_what_is_below_the_level_is_not_written() -> None:
    out = io.StringIO()
    logs.configure("WARNING", stream=out)
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    assert out.getvalue() == ""


def test_botocore_never_prints_bodies() -> None:
    out = io.StringIO()
    logs.configure("DEBUG", stream=out)
    logging.getLogger("botocore.endpoint").debug("the body")
    assert out.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_traceback_shows_no_variables(terminal: bool) -> None:
    class Out(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    out = Out()
    logs.configure("INFO", stream=out)
    try:
        _fail("a prompt nobody may see".upper())
    except ValueError:
        structlog.get_logger().exception("crashed")
    assert "ValueError: told" in out.getvalue()
    assert "A PROMPT" not in out.getvalue()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("LOUD")


def _fail(prompt: str) -> None:
    raise ValueError("told")
