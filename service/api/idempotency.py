"""What does an Idempotency-Key do? The same call sent again gets the first one's reply.

Nothing is claimed while a call runs. Its key is recorded in the transaction that makes its object;
a twin that comes to that point later finds it there, and takes back what it had stored itself.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Header, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from service.api.receive import Sink
from service.db import idempotency
from service.db.upload_models import IdempotencyKey, KeyedRoute
from service.errors import BadRequest, KeyReused

HEADER = "Idempotency-Key"
MAX_KEY = 255
REPLAYED = {"idempotency-replayed": "true"}


async def _checked(
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Sent again, the same call with the same key gets the first one's reply.",
            json_schema_extra={"minLength": 1, "maxLength": MAX_KEY, "pattern": "^[ -~]+$"},
        ),
    ] = None,
) -> str | None:
    key = idempotency_key
    if key is None or (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        return key
    raise BadRequest(
        f"Invalid value for '{HEADER}': expected 1 to {MAX_KEY} printable ASCII characters.",
        param=HEADER,
        code="invalid_value",
    )


Key = Annotated[str | None, Depends(_checked)]


@dataclass(frozen=True, slots=True)
class Once:
    """A call that may carry a key; without one, every call is a new one."""

    project_id: UUID
    route: KeyedRoute
    key: str | None
    # SHA-256 of everything that the call says.
    content: bytes
    kept: timedelta

    def replay(self, session: Session, at: datetime) -> Response | None:
        """What the key's first call was answered. To be asked first in the transaction that makes
        the object. Raises KeyReused."""
        if self.key is None:
            return None
        idempotency.wait_for_twin(session, self.project_id, self.route, self.key)
        used = idempotency.find(session, self.project_id, self.route, self.key, at)
        if used is None:
            return None
        if used.digest != self.content:
            raise KeyReused(
                f"The {HEADER} was used before for a request with other content. Send a new key"
                " with a new request."
            )
        return Response(used.reply, media_type="application/json", headers=REPLAYED)

    def keep(self, session: Session, reply: BaseModel, at: datetime) -> None:
        """Record the reply, in the same transaction."""
        if self.key is None:
            return
        idempotency.add(
            session,
            IdempotencyKey(
                project_id=self.project_id,
                route=self.route,
                key=self.key,
                digest=self.content,
                reply=reply.model_dump_json(),
                created_at=at,
                expires_at=at + self.kept,
            ),
        )


def digest(fields: Mapping[str, object]) -> bytes:
    """SHA-256 of a call's fields, in whatever order they came."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


class DigestingSink:
    """Passes bytes on and hashes them: a form's boundary differs from call to call, its file not.

    Only where `hashing`, since it costs about what the rest of an upload does (0.4 GB/s).
    """

    def __init__(self, sink: Sink, *, hashing: bool) -> None:
        self._sink, self._hashing = sink, hashing
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._hashing:
            self._hash.update(data)
        self._sink.write(data)

    def hexdigest(self) -> str:
        """Of all the bytes so far."""
        return self._hash.hexdigest()
