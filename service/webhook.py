"""What does a webhook say, how is it signed, and when is it tried again? Pure functions.

Signed as Standard Webhooks has it: HMAC-SHA256 over `id.timestamp.body`, under a secret written as
`whsec_` and base64. https://www.standardwebhooks.com
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

import orjson

from service.batch import BatchStatus

SECRET_PREFIX = "whsec_"  # noqa: S105 - how a secret begins
SECRET_BYTES = 24
SHOWN_CHARACTERS = 4

TRIED_FOR = timedelta(hours=24)
FIRST_DELAY = timedelta(seconds=5)
LONGEST_DELAY = timedelta(hours=1)


class EventType(StrEnum):
    """What an endpoint can be told of."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"


EVENT_OF = {
    BatchStatus.COMPLETED: EventType.COMPLETED,
    BatchStatus.FAILED: EventType.FAILED,
    BatchStatus.EXPIRED: EventType.EXPIRED,
    BatchStatus.CANCELLED: EventType.CANCELLED,
}
"""The event of each terminal status."""


def new_secret() -> str:
    """`whsec_` and 192 random bits, without padding."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """What may be shown of a secret again: `whsec_…x7Qa`."""
    return f"{SECRET_PREFIX}…{secret[-SHOWN_CHARACTERS:]}"


def event_body(event_id: str, event: EventType, created_at: datetime, batch_id: str) -> bytes:
    """The body; for the same event always the same bytes."""
    return orjson.dumps(
        {
            "id": event_id,
            "object": "event",
            "type": event,
            "created_at": int(created_at.timestamp()),
            "data": {"id": batch_id},
        }
    )


def headers(
    message_id: str, body: bytes, *, sent_at: datetime, signed_with: Sequence[str]
) -> dict[str, str]:
    """Stamped and signed, once under each secret. The id stays the same at a repetition."""
    stamp = str(int(sent_at.timestamp()))
    return {
        "content-type": "application/json",
        "user-agent": "halfrate",
        "webhook-id": message_id,
        "webhook-timestamp": stamp,
        "webhook-signature": " ".join(_sign(each, message_id, stamp, body) for each in signed_with),
    }


def _sign(secret: str, message_id: str, stamp: str, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{stamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


def next_try(failures: int, *, created_at: datetime, now: datetime, luck: float) -> datetime | None:
    """When to try again after so many failures; None once that lies beyond the 24 hours.

    The delay doubles up to an hour. `luck` in [0, 1) takes up to half of it off, so that those who
    failed together do not come back together.
    """
    doubled = FIRST_DELAY * 2 ** min(failures - 1, 16)
    at = now + min(doubled, LONGEST_DELAY) * (1 - luck / 2)
    return at if at <= created_at + TRIED_FOR else None
