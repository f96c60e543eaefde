"""What did each answer cost, and when did its tokens come?"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from engine.request import Work

# Whose token it is, None for nobody's who still runs; and how many.
Share = tuple[Hashable | None, int]


@dataclass(slots=True)
class _Account:
    """Times are the clock's, in seconds."""

    began: float
    first: float | None = None  # when the first token came
    last: float = 0.0  # when the last one came
    computed: int = 0
    seconds: float = 0.0
    rows: int = 0
    steps: float = 0.0


class Accounts:
    """One for each answer that runs, opened by its first tokens, closed or dropped at its end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._open: dict[Hashable, _Account] = {}

    def __len__(self) -> int:
        return len(self._open)

    def note(self, shares: Collection[Share], sampled: Collection[Hashable], began: float) -> None:
        """A step that began then has ended now: its tokens, and whose next token came of it."""
        now = self.clock()
        second_each = (now - began) / max(1, sum(count for _, count in shares))
        for key, count in shares:
            if key is None:
                continue
            account = self._open.setdefault(key, _Account(began))
            account.computed += count
            account.seconds += count * second_each
            account.rows += 1
            account.steps += 1 / len(shares)
        for key in sampled:
            account = self._open.setdefault(key, _Account(began))
            account.first = now if account.first is None else account.first
            account.last = now

    def drop(self, key: Hashable) -> None:
        """It ends without an answer, or never began."""
        self._open.pop(key, None)

    def close(self, key: Hashable, *, preempted: bool = False) -> Work:
        """It has its answer."""
        account = self._open.pop(key)
        first = account.began if account.first is None else account.first
        return Work(
            computed_tokens=account.computed,
            seconds=account.seconds,
            rows=round(account.rows / account.steps),
            first_token_s=first - account.began,
            later_tokens_s=account.last - first,
            preempted=preempted,
        )
