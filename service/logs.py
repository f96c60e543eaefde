"""How does a log line look? One event with fields: JSON, or coloured where a person watches.

Never a prompt, an output or a key: log ids, counts and the names of things.
"""

import logging
import sys
from typing import TextIO

import structlog

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure(level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Set logging up, once, at a process's entry point; libraries' own records come out alike.

    Fields bound by `structlog.contextvars` (request id, batch, shard) stand in every line.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}; known are {', '.join(LEVELS)}")
    out = sys.stderr if stream is None else stream
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.UnicodeDecoder(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(person_watches=out.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    _quiet_libraries()


def _rendering(*, person_watches: bool) -> list[structlog.typing.Processor]:
    if person_watches:
        # The plain formatter: the pretty one prints local variables, prompts among them.
        formatter = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=formatter)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _quiet_libraries() -> None:
    """Bring uvicorn's records to the root handler; at DEBUG botocore would print bodies."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Each request has its own event; each wake and each tick is no event at all.
    noisy = ("uvicorn.access", "celery.app.trace", "celery.worker.strategy", "celery.beat")
    for name in noisy:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("boto3", "botocore", "urllib3", "python_multipart", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A malformed upload is the client's affair and is answered there.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
