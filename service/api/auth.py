"""Who is calling, and may they? A bearer key says which project, and how much of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service import ids
from service.api.deps import Needs
from service.api.rate import RateLimiter
from service.db import keys
from service.db.models import Right
from service.errors import Forbidden, RateLimited, Unauthenticated

RANKS = (Right.READ, Right.SUBMIT, Right.ADMIN)
"""Each right includes those before it."""

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


def caller_with(right: Right) -> Callable[..., Caller]:
    """A dependency: the caller, if the key includes `right`. Raises 401, 403 and 429."""

    def caller(request: Request, parts: Needs, credentials: Credentials) -> Caller:
        if credentials is None:
            raise Unauthenticated(
                "You didn't provide an API key. You need to provide your API key in an"
                " Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
        with parts.database.transaction() as session:
            key = keys.use(session, credentials.credentials)
            if key is None:
                shown = keys.hint(credentials.credentials)
                raise Unauthenticated(f"Incorrect API key provided: {shown}")
            found = Caller(key.project_id, key.id, Right(key.rights))
        request.state.project = ids.show(ids.Prefix.PROJECT, found.project_id)
        if parts.limiter is not None:
            request.state.headers = _count(parts.limiter, found)
        if RANKS.index(found.right) < RANKS.index(right):
            raise Forbidden(f"This key has the right '{found.right}'; '{right}' is needed.")
        return found

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


# The right also stands in the OpenAPI document, as the role that the key needs.
Reader = Annotated[Caller, Security(caller_with(Right.READ), scopes=[Right.READ])]
Submitter = Annotated[Caller, Security(caller_with(Right.SUBMIT), scopes=[Right.SUBMIT])]
Administrator = Annotated[Caller, Security(caller_with(Right.ADMIN), scopes=[Right.ADMIN])]
