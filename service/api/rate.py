"""How many requests may a key make in a minute? Counted in Redis, for all API processes together.

The count is a convenience, never a gate that locks everyone out: while Redis is away, all pass.
"""

import math
import time
from dataclasses import dataclass
from uuid import UUID

import structlog
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from service.clock import Clock

PATIENCE_S = 0.25
"""Redis answers in less, or the request goes on without having been counted."""

REST_S = 2.0
"""After a failure Redis is not asked for so long, so that only a few requests wait for it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key has left; `granted` is whether this request was within it."""

    granted: bool
    limit: int
    remaining: int
    reset_s: int  # until more is free, at least 1

    def headers(self) -> dict[str, str]:
        """The reference's headers."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.reset_s}s",
        }


class RateLimiter:
    """One limit for every key. Thread-safe; never raises because of Redis."""

    def __init__(self, redis_url: str, *, per_minute: int, clock: Clock) -> None:
        self._pool = ConnectionPool.from_url(
            redis_url,
            socket_connect_timeout=PATIENCE_S,
            socket_timeout=PATIENCE_S,
            retry=Retry(NoBackoff(), 0),
        )
        storage = RedisStorage("redis://", connection_pool=self._pool, key_prefix="halfrate-rate")
        self._windows = SlidingWindowCounterRateLimiter(storage)
        self._item = RateLimitItemPerMinute(per_minute)
        self._clock = clock
        self._rests_until = 0.0

    def take(self, key_id: UUID) -> Allowance | None:
        """Count one request of the key. None where it could not be counted: it passes."""
        if self._clock() < self._rests_until:
            return None
        try:
            granted = self._windows.hit(self._item, key_id.hex)
            stats = self._windows.get_window_stats(self._item, key_id.hex)
        except (RedisError, OSError) as error:
            self._rests_until = self._clock() + REST_S
            _log.warning("requests are not counted", reason=str(error))
            return None
        return Allowance(
            granted=granted,
            limit=self._item.amount,
            remaining=stats.remaining if granted else 0,
            # The library reckons the time of the reset from the same clock, a moment ago.
            reset_s=max(1, math.ceil(stats.reset_time - time.time())),  # noqa: TID251
        )

    def close(self) -> None:
        """Give the connections back."""
        self._pool.disconnect()
