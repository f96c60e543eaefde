"""How does an upload get from the socket into the store? Piece by piece; it is never held whole."""

import unicodedata
from dataclasses import dataclass

from anyio.to_thread import run_sync
from starlette.requests import Request

from service.api.multipart import FILE, Event, Field, FileData, FileStart, FormReader
from service.errors import BadRequest, TooLarge
from service.settings import MIB
from service.storage import ObjectWriter
from service.wire import EXPIRES_AFTER_MAX_S, EXPIRES_AFTER_MIN_S, Purpose

FORM_OVERHEAD = 64 * 1024
"""Most bytes that a form may have beside the file itself."""

HELD_BYTES = MIB
"""Pieces are handed to the writer's thread when they come to this much."""

MAX_FILENAME = 255
BATCH_ENDINGS = (".jsonl", ".ndjson")

PURPOSE = "purpose"
ANCHOR = "expires_after[anchor]"
SECONDS = "expires_after[seconds]"
FIELDS = (PURPOSE, ANCHOR, SECONDS)


@dataclass(frozen=True, slots=True)
class Upload:
    """A form that was read to its end and found good."""

    filename: str
    purpose: Purpose
    expires_after_s: int | None
    size: int


async def receive(request: Request, writer: ObjectWriter, *, max_bytes: int) -> Upload:
    """Stream the form's file into `writer`, which the caller finishes or aborts.

    Raises 400 as soon as something is wrong, 413 as soon as the file is too large, and Starlette's
    ClientDisconnect.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes + FORM_OVERHEAD:
        raise _too_large(max_bytes)
    reader = FormReader(request.headers.get("content-type", ""))
    form = Form(max_bytes)
    async for chunk in request.stream():
        for event in reader.feed(chunk):
            form.take(event)
        if form.held >= HELD_BYTES:
            await run_sync(writer.write, form.release())
    reader.finish()
    upload = form.result()
    await run_sync(writer.write, form.release())
    return upload


class Form:
    """Checks the form's parts as they come, in any order, and holds the next bytes to write."""

    def __init__(self, max_bytes: int) -> None:
        self.held = 0
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._filename: str | None = None
        self._fields: dict[str, str] = {}

    def take(self, event: Event) -> None:
        """One event of the form. Raises BadRequest and TooLarge."""
        match event:
            case FileStart(filename):
                if self._filename is not None:
                    raise _invalid(FILE, "one file at a time is taken")
                self._filename = _checked_filename(filename)
                self._check_format()
            case FileData(data):
                self._size += len(data)
                if self._size > self._max_bytes:
                    raise _too_large(self._max_bytes)
                self._pieces.append(data)
                self.held += len(data)
            case Field(name, value):
                self._take_field(name, value)

    def release(self) -> bytes:
        """The bytes held; they are the caller's now."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self.held = 0
        return data

    def result(self) -> Upload:
        """What was uploaded, once the form has ended."""
        if self._filename is None:
            raise _missing(FILE)
        if PURPOSE not in self._fields:
            raise _missing(PURPOSE)
        if self._size == 0:
            raise BadRequest("The file is empty.", param=FILE, code="empty_file")
        return Upload(
            filename=self._filename,
            purpose=Purpose(self._fields[PURPOSE]),
            expires_after_s=self._expires_after(),
            size=self._size,
        )

    def _take_field(self, name: str, value: str) -> None:
        if name not in FIELDS:
            shown = name[:MAX_FILENAME]
            raise BadRequest(
                f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter"
            )
        if name in self._fields:
            raise _invalid(name, "it is given twice")
        if name == PURPOSE and value not in list(Purpose):
            raise _invalid(name, f"expected one of {', '.join(Purpose)}")
        self._fields[name] = value
        self._check_format()

    def _check_format(self) -> None:
        """Known as soon as both the name and the purpose are."""
        if (
            self._filename is not None
            and self._fields.get(PURPOSE) == Purpose.BATCH
            and not self._filename.lower().endswith(BATCH_ENDINGS)
        ):
            raise BadRequest(
                "Invalid file format for Batch API. Must be .jsonl",
                param=FILE,
                code="invalid_file_format",
            )

    def _expires_after(self) -> int | None:
        anchor, seconds = self._fields.get(ANCHOR), self._fields.get(SECONDS)
        if anchor is None and seconds is None:
            return None
        if anchor is None:
            raise _missing(ANCHOR)
        if seconds is None:
            raise _missing(SECONDS)
        if anchor != "created_at":
            raise _invalid(ANCHOR, "expected 'created_at'")
        if not (seconds.isascii() and seconds.isdecimal() and len(seconds) <= 9):
            raise BadRequest(
                f"Invalid type for '{SECONDS}': expected an integer.",
                param=SECONDS,
                code="invalid_type",
            )
        if not EXPIRES_AFTER_MIN_S <= int(seconds) <= EXPIRES_AFTER_MAX_S:
            raise _invalid(
                SECONDS, f"expected {EXPIRES_AFTER_MIN_S} to {EXPIRES_AFTER_MAX_S} seconds"
            )
        return int(seconds)


def _checked_filename(name: str) -> str:
    """The name as given; it is shown and sent back in a header, and never used as a path."""
    if len(name) > MAX_FILENAME:
        raise _invalid(FILE, f"its filename is longer than {MAX_FILENAME} characters")
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise _invalid(FILE, "its filename holds a control character")
    return name


def _missing(name: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )


def _invalid(name: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{name}': {reason}.", param=name, code="invalid_value")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The file is larger than the limit of {max_bytes} bytes.", param=FILE)
