"""Whose is an API key, and how are projects and keys made?

A key is shown once and kept as its SHA-256 only: 256 random bits need no slow hash.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session

from service.db.base import Base
from service.db.models import ApiKey, Project, Right
from service.db.session import now
from service.ids import new_id

KEY_PREFIX = "sk-hr-"
SHOWN_CHARACTERS = 4
USE_RECORDED_EVERY = timedelta(minutes=1)

T = TypeVar("T", bound=Base)


@dataclass(frozen=True, slots=True)
class ProjectSummary:
    """A project, its keys that are not revoked, and the last use of any."""

    project: Project
    good_keys: int
    last_used_at: datetime | None


def create_project(session: Session, name: str) -> Project:
    """A new tenant. The name is unique: a second one of it is an IntegrityError."""
    project = Project(id=new_id(), name=name, created_at=now(session))
    session.add(project)
    session.flush()
    return project


def project_named(session: Session, name: str) -> Project | None:
    """The project of that name."""
    return session.scalar(select(Project).where(Project.name == name))


def projects(session: Session) -> list[ProjectSummary]:
    """All projects, oldest first."""
    good = func.count(ApiKey.id).filter(ApiKey.revoked_at.is_(None))
    rows = session.execute(
        select(Project, good, func.max(ApiKey.last_used_at))
        .outerjoin(ApiKey, ApiKey.project_id == Project.id)
        .group_by(Project.id)
        .order_by(Project.id)
    )
    return [ProjectSummary(*row) for row in rows]


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
    return _found(session, plaintext)[0]


def use(session: Session, plaintext: str) -> ApiKey | None:
    """As `find`, for a request: its use is stamped.

    At most once a minute, so that reading does not turn into writing.
    """
    key, stale = _found(session, plaintext)
    if key is not None and stale:
        _stamp(session, key)
    return key


def use_beside(
    session: Session, plaintext: str, beside: type[T], on: ColumnElement[bool]
) -> tuple[ApiKey | None, T | None]:
    """As `use`, and in the same statement the one row of another table that `on` ties to the key:
    for what clients ask again and again, a round trip and its two waits for a core less."""
    digest = _digest(plaintext)
    query = select(ApiKey, _stale(), beside).outerjoin(beside, on).where(_is(digest))
    row = session.execute(query).one_or_none()
    if row is None or not hmac.compare_digest(row[0].hash, digest):
        return None, None
    if row[1]:
        _stamp(session, row[0])
    return row[0], row[2]


def _stamp(session: Session, key: ApiKey) -> None:
    # Looked at again, since many requests may have found it stale at once.
    session.execute(
        update(ApiKey)
        .where(ApiKey.id == key.id, _stale())
        .values(last_used_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
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


def _found(session: Session, plaintext: str) -> tuple[ApiKey | None, bool]:
    """The key, and whether its stamp is old: one statement, since each request begins with it."""
    digest = _digest(plaintext)
    row = session.execute(select(ApiKey, _stale()).where(_is(digest))).one_or_none()
    if row is None or not hmac.compare_digest(row[0].hash, digest):
        return None, False
    return row[0], row[1]


def _is(digest: bytes) -> ColumnElement[bool]:
    return and_(ApiKey.hash == digest, ApiKey.revoked_at.is_(None))


def _stale() -> ColumnElement[bool]:
    long_ago = func.clock_timestamp() - USE_RECORDED_EVERY
    return or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= long_ago)


def _digest(plaintext: str) -> bytes:
    return hashlib.sha256(plaintext.encode()).digest()
