"""Which bytes does a Range header ask for? One range is honoured (RFC 9110, 14)."""

import re
from dataclasses import dataclass

from service.errors import ServiceError

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.IGNORECASE)


class Unsatisfiable(ServiceError):
    """The range begins behind the object's end."""

    status = 416
    kind = "invalid_request_error"
    code = "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range begins behind the end of the {size} bytes.")
        self.headers = {"content-range": f"bytes */{size}"}


@dataclass(frozen=True, slots=True)
class Span:
    """`length` bytes from `start`; at least one."""

    start: int
    length: int

    def content_range(self, size: int) -> str:
        """The value of the header that names it."""
        return f"bytes {self.start}-{self.start + self.length - 1}/{size}"


def wanted(header: str | None, size: int) -> Span | None:
    """The span of an object of `size` bytes; None for all of it, as for a header not understood.

    Several ranges at once count as not understood, which the RFC allows. Raises Unsatisfiable.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        if length == 0:
            raise Unsatisfiable(size)
        return Span(size - length, length)
    start, last = int(match[1]), int(match[2] or size - 1)
    if match[2] and last < start:
        return None
    if start >= size:
        raise Unsatisfiable(size)
    return Span(start, min(last, size - 1) - start + 1)
