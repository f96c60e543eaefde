"""How is what a line took told to the client?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.readings import Reading


@dataclass(frozen=True, slots=True)
class Usage:
    """A line's tokens: taken in, of those computed before, and made."""

    taken: int
    cached: int = 0
    made: int = 0

    def of_completion(self) -> dict[str, Any]:
        """As chat and completions tell it."""
        return {
            "prompt_tokens": self.taken,
            "completion_tokens": self.made,
            "total_tokens": self.taken + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def of_response(self) -> dict[str, Any]:
        """As responses tell it."""
        return {
            "input_tokens": self.taken,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.taken + self.made,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's body, and what it took."""

    body: Mapping[str, Any]
    usage: Usage


def encoded(
    body: Mapping[str, Any], readings: Sequence[Reading], *, truncate: bool | None
) -> Reply:
    """The reply of an endpoint that encodes, its usage added: what was cut off is told where
    cutting was allowed."""
    taken = sum(len(reading.tokens) for reading in readings)
    usage = {"prompt_tokens": taken, "total_tokens": taken}
    if truncate:
        usage["truncated_tokens"] = sum(reading.cut for reading in readings)
    return Reply({**body, "usage": usage}, Usage(taken))
