"""Is a line that failed to be tried again, and when? A pure function of the failure."""

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import assert_never

FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 300.0


class LineFailure(StrEnum):
    """What can happen to a line. The word is the line's `error_code`."""

    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid_value"
    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Final:
    """Not to be tried again: the line's error, with this status."""

    status_code: int


@dataclass(frozen=True, slots=True)
class Again:
    """To be tried again, not before then."""

    at: datetime


def decide(
    failure: LineFailure, *, attempts: int, max_attempts: int, now: datetime, luck: float
) -> Final | Again:
    """`attempts` counts this one. `luck` in [0, 1) spreads the retries (full jitter)."""
    match failure:
        case LineFailure.TOO_LONG | LineFailure.INVALID:
            return Final(400)
        case LineFailure.NON_FINITE:
            return Final(500)  # the engine tried it again itself, in float32
        case LineFailure.OUT_OF_MEMORY | LineFailure.INTERNAL:
            if attempts >= max_attempts:
                return Final(500)
            longest = min(FIRST_DELAY_S * 2 ** (attempts - 1), LONGEST_DELAY_S)
            return Again(now + timedelta(seconds=luck * longest))
        case unreachable:
            assert_never(unreachable)


def luck() -> float:
    """A number in [0, 1)."""
    return random.random()  # noqa: S311 - jitter, not a secret
