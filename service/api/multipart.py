"""What comes in a multipart/form-data body? Pushed in as bytes, out as events; nothing is kept.

Only one part, in most forms `file`, is data of any size; every other is a short text field.
"""

from dataclasses import dataclass

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header

from service.errors import BadRequest

FILE = "file"
MAX_PARTS = 16
MAX_FIELD_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class FileStart:
    """The file's part begins."""

    filename: str


@dataclass(frozen=True, slots=True)
class FileData:
    """More of the file."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Field:
    """A text field, whole."""

    name: str
    value: str


Event = FileStart | FileData | Field


class FormReader:
    """Feed it the body's pieces in order, then `finish`. Raises BadRequest where it is broken."""

    def __init__(self, content_type: str, *, data: str = FILE, named: bool = True) -> None:
        # The part that is data, and whether it must have a filename.
        self._data, self._named = data, named
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise _broken("the content-type must be multipart/form-data with a boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except ValueError as error:
            raise _broken(str(error)) from error
        self._events: list[Event] = []
        self._parts = 0
        self._ended = False
        self._on_part_begin()

    def feed(self, data: bytes) -> list[Event]:
        """What `data` adds."""
        if self._ended:
            return []  # an epilogue, which RFC 2046 lets a reader skip
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _broken(str(error)) from error
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Raises unless the last boundary was seen: a body that was cut off is no upload."""
        if not self._ended:
            raise _broken("it ends before its closing boundary")

    def _on_part_begin(self) -> None:
        self._headers: dict[str, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name = ""
        self._value = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        kind, options = parse_options_header(self._headers.get("content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part has no name")
        self._name = _text(options[b"name"], "name of a part", None)
        if self._name == self._data:
            filename = options.get(b"filename", b"")
            if self._named and not filename:
                raise BadRequest(
                    f"Invalid '{self._data}': it must be sent as a file, with a filename.",
                    param=self._data,
                    code="invalid_value",
                )
            self._events.append(FileStart(_text(filename, "filename", self._data)))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._data:
            self._events.append(FileData(data[start:end]))
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise _broken(f"a field is longer than {MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._name != self._data:
            value = _text(bytes(self._value), f"value of '{self._name}'", self._name)
            self._events.append(Field(self._name, value))

    def _on_end(self) -> None:
        self._ended = True


def _text(raw: bytes, what: str, param: str | None) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"The {what} is not valid UTF-8.", param=param, code="invalid_encoding"
        ) from error


def _broken(reason: str) -> BadRequest:
    return BadRequest(f"The multipart body cannot be read: {reason}.", code="invalid_multipart")
