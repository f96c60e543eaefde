"""How are ids made and shown? A UUIDv7 in the database, `<kind>_<hex>` on the wire."""

import secrets
import time
from enum import StrEnum
from uuid import UUID

RANDOM_BITS = 62


class Prefix(StrEnum):
    """What stands before an id on the wire."""

    FILE = "file-"
    BATCH = "batch_"
    UPLOAD = "upload_"
    PART = "part_"
    KEY = "key_"
    PROJECT = "proj_"
    LINE = "batch_req_"
    REQUEST = "req_"
    WEBHOOK_ENDPOINT = "we_"
    EVENT = "evt_"
    DELIVERY = "wh_"


def new_id() -> UUID:
    """A UUIDv7 (RFC 9562): ids sort by creation to the millisecond, so they page newest first."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80
    value |= 0x7 << 76
    value |= secrets.randbits(12) << 64
    value |= 0b10 << RANDOM_BITS
    value |= secrets.randbits(RANDOM_BITS)
    return UUID(int=value)


def show(prefix: Prefix, value: UUID) -> str:
    """`batch_0190…`: the id as clients see it."""
    return f"{prefix}{value.hex}"


def show_line(line: int) -> str:
    """`line_17`: a line is known by its number in the batch's input file."""
    return f"line_{line}"


def parse_line(text: str) -> int | None:
    """The number in `text`, or None where it is not one that `show_line` could have made."""
    digits = text.removeprefix("line_")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 9:
        return None
    return int(digits) if show_line(int(digits)) == text else None


def parse(prefix: Prefix, text: str) -> UUID | None:
    """The id in `text`, or None where it is not one that `show` could have made."""
    digits = text.removeprefix(prefix)
    if len(digits) != 32 or digits == text:
        return None
    try:
        value = UUID(hex=digits)
    except ValueError:
        return None
    return value if value.hex == digits else None
