"""How does an upload get from the socket into the store? Piece by piece; it is never held whole."""

from dataclasses import dataclass
from typing import Protocol

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.requests import Request

from service.api.multipart import FILE, Event, Field, FileData, FileStart, FormReader
from service.api.naming import check_ending, check_name
from service.errors import BadRequest, TooLarge
from service.settings import MIB
from service.wire import EXPIRES_AFTER_MAX_S, EXPIRES_AFTER_MIN_S, MAX_FILENAME, Purpose

FORM_OVERHEAD = 64 * 1024
"""Most bytes that a form may have beside the file itself."""

HELD_BYTES = MIB
"""Pieces are handed to the writer's thread when they come to this much."""

DATA = "data"
PURPOSE = "purpose"
ANCHOR = "expires_after[anchor]"
SECONDS = "expires_after[seconds]"
FIELDS = (PURPOSE, ANCHOR, SECONDS)


class Sink(Protocol):
    """Where the bytes go."""

    def write(self, data: bytes) -> None:
        """Take the next bytes."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A form that was read to its end and found good."""

    filename: str
    purpose: Purpose
    expires_after_s: int | None
    size: int


async def receive(
    request: Request, sink: Sink, *, max_bytes: int, writers: CapacityLimiter
) -> Upload:
    """Stream the form's file into `sink`, which the caller finishes or aborts.

    Raises 400 as soon as something is wrong, 413 as soon as the file is too large, and Starlette's
    ClientDisconnect.
    """
    form = Form(max_bytes)
    reader = FormReader(request.headers.get("content-type", ""))
    await _pour(request, sink, reader, form, writers)
    upload = form.result()
    await run_sync(sink.write, form.pieces.release(), limiter=writers)
    return upload


async def receive_part(
    request: Request, sink: Sink, *, max_bytes: int, writers: CapacityLimiter
) -> int:
    """Stream the form's `data`, a part of an upload, into `sink`: its size. Raises as `receive`."""
    form = PartForm(max_bytes)
    reader = FormReader(request.headers.get("content-type", ""), data=DATA, named=False)
    await _pour(request, sink, reader, form, writers)
    size = form.result()
    await run_sync(sink.write, form.pieces.release(), limiter=writers)
    return size


async def _pour(
    request: Request,
    sink: Sink,
    reader: FormReader,
    form: "Form | PartForm",
    writers: CapacityLimiter,
) -> None:
    """All of the body; the last bytes are still held when it returns."""
    form.pieces.check_declared(request.headers.get("content-length", ""))
    async for chunk in request.stream():
        for event in reader.feed(chunk):
            form.take(event)
        if form.pieces.held >= HELD_BYTES:
            await run_sync(sink.write, form.pieces.release(), limiter=writers)
    reader.finish()


class Pieces:
    """The next bytes to write, and how many there have been. Raises TooLarge."""

    def __init__(self, param: str, max_bytes: int) -> None:
        self.held = 0
        self.size = 0
        self._param, self._max_bytes = param, max_bytes
        self._pieces: list[bytes] = []

    def check_declared(self, content_length: str) -> None:
        """A body that says that it is too large need not be read."""
        if content_length.isdecimal() and int(content_length) > self._max_bytes + FORM_OVERHEAD:
            raise self._too_large()

    def add(self, data: bytes) -> None:
        """Hold `data`."""
        self.size += len(data)
        if self.size > self._max_bytes:
            raise self._too_large()
        self._pieces.append(data)
        self.held += len(data)

    def release(self) -> bytes:
        """The bytes held; they are the caller's now."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self.held = 0
        return data

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"The {self._param} is larger than the limit of {self._max_bytes} bytes.",
            param=self._param,
        )


class PartForm:
    """Checks a form that has one part, `data`."""

    def __init__(self, max_bytes: int) -> None:
        self.pieces = Pieces(DATA, max_bytes)
        self._begun = False

    def take(self, event: Event) -> None:
        """One event of the form. Raises BadRequest and TooLarge."""
        match event:
            case FileStart():
                if self._begun:
                    raise _invalid(DATA, "one part at a time is taken")
                self._begun = True
            case FileData(data):
                self.pieces.add(data)
            case Field(name, _):
                raise _unknown(name)

    def result(self) -> int:
        """The part's size, once the form has ended."""
        if not self._begun:
            raise _missing(DATA)
        if self.pieces.size == 0:
            raise _invalid(DATA, "a part has at least one byte")
        return self.pieces.size


class Form:
    """Checks the form's parts as they come, in any order."""

    def __init__(self, max_bytes: int) -> None:
        self.pieces = Pieces(FILE, max_bytes)
        self._filename: str | None = None
        self._fields: dict[str, str] = {}

    def take(self, event: Event) -> None:
        """One event of the form. Raises BadRequest and TooLarge."""
        match event:
            case FileStart(filename):
                if self._filename is not None:
                    raise _invalid(FILE, "one file at a time is taken")
                check_name(filename, param=FILE)
                self._filename = filename
                self._check_format()
            case FileData(data):
                self.pieces.add(data)
            case Field(name, value):
                self._take_field(name, value)

    def result(self) -> Upload:
        """What was uploaded, once the form has ended."""
        if self._filename is None:
            raise _missing(FILE)
        if PURPOSE not in self._fields:
            raise _missing(PURPOSE)
        if self.pieces.size == 0:
            raise BadRequest("The file is empty.", param=FILE, code="empty_file")
        return Upload(
            filename=self._filename,
            purpose=Purpose(self._fields[PURPOSE]),
            expires_after_s=self._expires_after(),
            size=self.pieces.size,
        )

    def _take_field(self, name: str, value: str) -> None:
        if name not in FIELDS:
            raise _unknown(name)
        if name in self._fields:
            raise _invalid(name, "it is given twice")
        if name == PURPOSE and value not in list(Purpose):
            raise _invalid(name, f"expected one of {', '.join(Purpose)}")
        self._fields[name] = value
        self._check_format()

    def _check_format(self) -> None:
        """Known as soon as both the name and the purpose are."""
        if self._filename is not None and PURPOSE in self._fields:
            check_ending(self._filename, self._fields[PURPOSE], param=FILE)

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


def _unknown(name: str) -> BadRequest:
    shown = name[:MAX_FILENAME]
    return BadRequest(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")


def _missing(name: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )


def _invalid(name: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{name}': {reason}.", param=name, code="invalid_value")
