"""Whose is an API key, and how are projects and keys made?

A key is shown once and kept as its SHA-256 only: 256 random bits need no slow hash.
"""

import hashlib
import hmac
import secrets
from datetime import timedelta
from uuid import UUID

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from service.db.models import ApiKey, Project, Right
from service.db.session import now
from service.ids import new_id

KEY_PREFIX = "sk-hr-"
SHOWN_CHARACTERS = 4
USE_RECORDED_EVERY = timedelta(minutes=1)


def create_project(session: Session, name: str) -> Project:
    """A new tenant. The name is unique: a second one of it is an IntegrityError."""
    project = Project(id=new_id(), name=name, created_at=now(session))
    session.add(project)
    session.flush()
    return project


def project_named(session: Session, name: str) -> Project | None:
    """The project of that name."""
    return session.scalar(select(Project).where(Project.name == name))


def create_key(session: Session, project_id: UUID, name: str, right: Right) -> tuple[ApiKey, str]:
    """A new key and its plaintext, which nothing can show again."""
    plaintext = KEY_PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(
        id=new_id(),
        project_id=project_id,
        name=name,
        hash=_digest(plaintext),
        hint=hint(plaintext),
        rights=right,
        created_at=now(session),
    )
    session.add(key)
    session.flush()
    return key, plaintext


def find(session: Session, plaintext: str) -> ApiKey | None:
    """The key that `plaintext` is, unless it was revoked."""
    digest = _digest(plaintext)
    key = session.scalar(select(ApiKey).where(ApiKey.hash == digest, ApiKey.revoked_at.is_(None)))
    if key is None or not hmac.compare_digest(key.hash, digest):
        return None
    return key


def record_use(session: Session, key: ApiKey) -> None:
    """Stamp `last_used_at`, at most once a minute, so that reading does not turn into writing."""
    at = now(session)
    if key.last_used_at is not None and key.last_used_at > at - USE_RECORDED_EVERY:
        return
    session.execute(
        update(ApiKey)
        .where(
            ApiKey.id == key.id,
            or_(
                ApiKey.last_used_at.is_(None),
                ApiKey.last_used_at <= at - USE_RECORDED_EVERY,
            ),
        )
        .values(last_used_at=at)
    )


def keys_of(session: Session, project_id: UUID | None = None) -> list[ApiKey]:
    """The keys of one project, or of all, oldest first, revoked ones included."""
    query = select(ApiKey).order_by(ApiKey.id)
    if project_id is not None:
        query = query.where(ApiKey.project_id == project_id)
    return list(session.scalars(query))


def revoke(session: Session, key_id: UUID) -> ApiKey | None:
    """End a key, from its next request on; again is fine. None where there is no such key."""
    key = session.get(ApiKey, key_id, with_for_update=True)
    if key is not None and key.revoked_at is None:
        key.revoked_at = now(session)
        session.flush()
    return key


def hint(plaintext: str) -> str:
    """What may be shown of a key: `sk-hr-…x7Qa`; of a short one, nothing."""
    start = KEY_PREFIX if plaintext.startswith(KEY_PREFIX) else ""
    rest = plaintext.removeprefix(start)
    if len(rest) < 4 * SHOWN_CHARACTERS or not rest.isascii() or not rest.isprintable():
        return f"{start}…"
    return f"{start}…{rest[-SHOWN_CHARACTERS:]}"


def _digest(plaintext: str) -> bytes:
    return hashlib.sha256(plaintext.encode()).digest()
