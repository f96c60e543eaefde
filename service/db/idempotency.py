"""What was answered to a call that carried an idempotency key?

The key is recorded in the transaction that makes the object, so a call that failed, or a process
that died, leaves no key behind: there is no claim that somebody would have to take back.
"""

from datetime import datetime
from uuid import UUID

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from service.db.upload_models import IdempotencyKey, KeyedRoute


def wait_for_twin(session: Session, project_id: UUID, route: KeyedRoute, key: str) -> None:
    """Let a call of the same key that is just being recorded end first; until this transaction
    ends, no other one of the key is recorded.

    It takes as long as the other's transaction, which does no more than insert its rows. The bound
    is for the case that its process hangs in there: a wait that fails is answered 503.
    """
    session.execute(text("SET LOCAL lock_timeout = '10s'"))
    session.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"),
        {"name": f"{project_id.hex} {route} {key}"},
    )


def find(
    session: Session, project_id: UUID, route: KeyedRoute, key: str, at: datetime
) -> IdempotencyKey | None:
    """What the key was used for, unless it has run out by `at`; then it is free again."""
    of_key = (
        IdempotencyKey.project_id == project_id,
        IdempotencyKey.route == route,
        IdempotencyKey.key == key,
    )
    session.execute(delete(IdempotencyKey).where(*of_key, IdempotencyKey.expires_at <= at))
    return session.scalar(select(IdempotencyKey).where(*of_key))


def add(session: Session, used: IdempotencyKey) -> None:
    """Record a key with the reply it led to."""
    session.add(used)
    session.flush()


def forget(session: Session, now: datetime) -> None:
    """Remove the keys that have run out."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.expires_at <= now))
