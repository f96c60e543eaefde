"""May a file be called that? A name is shown and sent back in a header, never used as a path."""

import unicodedata

from service.errors import BadRequest
from service.wire import MAX_FILENAME, Purpose

BATCH_ENDINGS = (".jsonl", ".ndjson")


def check_name(name: str, *, param: str) -> None:
    """Raises BadRequest, naming `param`, unless the name can be kept."""
    if len(name) > MAX_FILENAME:
        raise _invalid(param, f"its filename is longer than {MAX_FILENAME} characters")
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise _invalid(param, "its filename holds a control character")


def check_ending(name: str, purpose: str, *, param: str) -> None:
    """Raises BadRequest, naming `param`, where a batch could not read a file of that name."""
    if purpose == Purpose.BATCH and not name.lower().endswith(BATCH_ENDINGS):
        raise BadRequest(
            "Invalid file format for Batch API. Must be .jsonl",
            param=param,
            code="invalid_file_format",
        )


def _invalid(param: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
