"""Who is calling, and may they? A bearer key says which project, and how much of it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session

from service import ids
from service.api.deps import Needs, Parts
from service.api.rate import RateLimiter
from service.db import keys
from service.db.base import Base
from service.db.models import ApiKey, Right
from service.errors import Forbidden, RateLimited, Unauthenticated

RANKS = (Right.READ, Right.SUBMIT, Right.ADMIN)
"""Each right includes those before it."""

T = TypeVar("T", bound=Base)

_bearer = HTTPBearer(
    auto_error=False, scheme_name="API key", description="`Authorization: Bearer sk-hr-…`"
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]


@dataclass(frozen=True, slots=True)
class Caller:
    """A request's key, found good."""

    project_id: UUID
    key_id: UUID
    right: Right


@dataclass(frozen=True, slots=True)
class Visitor:
    """A request whose key is yet to be looked at, and the right that it needs."""

    request: Request
    parts: Parts
    credentials: HTTPAuthorizationCredentials | None
    right: Right

    def admit(self, session: Session) -> Caller:
        """The caller, if the key includes the right. Raises 401, 403 and 429."""
        return self._admitted(keys.use(session, self._given()))

    def admit_beside(
        self, session: Session, beside: type[T], on: ColumnElement[bool]
    ) -> tuple[Caller, T | None]:
        """The caller, and the row of another table that `on` ties to the key."""
        key, row = keys.use_beside(session, self._given(), beside, on)
        return self._admitted(key), row

    def _given(self) -> str:
        if self.credentials is None:
            raise Unauthenticated(
                "You didn't provide an API key. You need to provide your API key in an"
                " Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
        return self.credentials.credentials

    def _admitted(self, key: ApiKey | None) -> Caller:
        if key is None:
            raise Unauthenticated(f"Incorrect API key provided: {keys.hint(self._given())}")
        found = Caller(key.project_id, key.id, Right(key.rights))
        self.request.state.project = ids.show(ids.Prefix.PROJECT, found.project_id)
        if self.parts.limiter is not None:
            self.request.state.headers = _count(self.parts.limiter, found)
        if RANKS.index(found.right) < RANKS.index(self.right):
            raise Forbidden(f"This key has the right '{found.right}'; '{self.right}' is needed.")
        return found


def visitor_with(right: Right) -> Callable[..., Coroutine[None, None, Visitor]]:
    """A dependency that asks nobody: the route itself admits the visitor, where it reads anyway."""

    # A coroutine, since the framework would take a thread for a plain function.
    async def visitor(request: Request, parts: Needs, credentials: Credentials) -> Visitor:
        return Visitor(request, parts, credentials, right)

    return visitor


def caller_with(right: Right) -> Callable[..., Caller]:
    """A dependency: the caller, if the key includes `right`. Raises 401, 403 and 429."""

    def caller(request: Request, parts: Needs, credentials: Credentials) -> Caller:
        with parts.database.reading() as session:
            return Visitor(request, parts, credentials, right).admit(session)

    return caller


def _count(limiter: RateLimiter, caller: Caller) -> dict[str, str]:
    """The headers that every answer to this key has. Raises 429."""
    allowance = limiter.take(caller.key_id)
    if allowance is None:
        return {}
    if not allowance.granted:
        error = RateLimited(
            f"Rate limit reached for this key: {allowance.limit} requests a minute. Please try"
            f" again in {allowance.reset_s}s.",
            retry_after=allowance.reset_s,
        )
        error.headers.update(allowance.headers())
        raise error
    return allowance.headers()


ReadingVisitor = Annotated[Visitor, Security(visitor_with(Right.READ), scopes=[Right.READ])]
# The right also stands in the OpenAPI document, as the role that the key needs.
Reader = Annotated[Caller, Security(caller_with(Right.READ), scopes=[Right.READ])]
Submitter = Annotated[Caller, Security(caller_with(Right.SUBMIT), scopes=[Right.SUBMIT])]
Administrator = Annotated[Caller, Security(caller_with(Right.ADMIN), scopes=[Right.ADMIN])]
