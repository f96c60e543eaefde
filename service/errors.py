"""Which errors can the service answer with, and as what status and code?

    ServiceError
    ├── BadRequest            400
    ├── Unauthenticated       401
    ├── Forbidden             403
    ├── NotFound              404
    │   └── BatchOnly         404 batch_only
    ├── TooSlow               408
    ├── Conflict              409, not to be retried
    │   └── KeyReused         409 idempotency_key_reused
    ├── TooLarge              413
    ├── RateLimited           429
    └── Unavailable           503, to be retried

Raised where the fact is known, turned into HTTP in one place (`service.api.app`).
"""


class ServiceError(Exception):
    """An answer that is not a success. The message is written for the client."""

    status = 500
    kind = "server_error"
    code: str | None = None
    headers: dict[str, str]

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.headers = {}


class BadRequest(ServiceError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    kind = "invalid_request_error"


class Unauthenticated(ServiceError):
    """No key, or one that is unknown or revoked."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"www-authenticate": "Bearer"}


class Forbidden(ServiceError):
    """The key is good but lacks the right."""

    status = 403
    kind = "permission_error"
    code = "insufficient_permissions"


class NotFound(ServiceError):
    """No such object in the caller's project."""

    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class BatchOnly(NotFound):
    """A live call; this service answers lines of batches only."""

    code = "batch_only"


class TooSlow(ServiceError):
    """The request's body stopped coming."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        # What is still to come of the body is not waited for.
        self.headers = {"connection": "close"}


class Conflict(ServiceError):
    """The object's state forbids it, and waiting will not change that."""

    status = 409
    kind = "invalid_request_error"
    code = "conflict"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        # The official client retries 409 unless told not to.
        self.headers = {"x-should-retry": "false"}


class KeyReused(Conflict):
    """The idempotency key was used for a call of other content."""

    code = "idempotency_key_reused"


class TooLarge(ServiceError):
    """More bytes than the setting allows."""

    status = 413
    kind = "invalid_request_error"
    code = "file_too_large"


class RateLimited(ServiceError):
    """Too many requests; `retry_after` seconds from now it may pass."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}


class Unavailable(ServiceError):
    """A part that this answer needs is not there at the moment."""

    status = 503
    kind = "server_error"
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after)}
