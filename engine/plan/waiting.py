"""Which waiting requests make the next batch?

Those of one `submit` call are a group. The oldest group always gets the next batch, its longest
requests first; where it cannot fill the batch, requests of like length from younger groups join.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.plan.buckets import bucket_floor


class Identified(Protocol):
    """Anything that has an id."""

    @property
    def id(self) -> Hashable:
        """What its result will be named by."""
        ...


T = TypeVar("T", bound=Identified)


class Waiting(Generic[T]):
    """The requests that no batch has taken yet; `length` measures one in tokens."""

    def __init__(self, length: Callable[[T], int]) -> None:
        self._length = length
        self._groups: deque[list[T]] = deque()  # each sorted, the longest last

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups)

    def add(self, requests: Iterable[T]) -> None:
        """Put one group at the end of the line."""
        group = sorted(requests, key=self._length)
        if group:
            self._groups.append(group)

    def put_back(self, requests: Iterable[T]) -> None:
        """Put what a batch had taken at the front again."""
        group = sorted(requests, key=self._length)
        if group:
            self._groups.appendleft(group)

    def remove(self, ids: Collection[Hashable]) -> None:
        """Forget these."""
        kept = ([item for item in group if item.id not in ids] for group in self._groups)
        self._groups = deque(group for group in kept if group)

    def take(self, fits: Callable[[Sequence[T]], bool]) -> list[T]:
        """Take the next batch, longest first; empty when nothing waits.

        `fits` is asked whether a batch may stand as it is. The first request is taken without
        asking: one that is over every budget still runs, alone.
        """
        if not self._groups:
            return []
        batch = [self._groups[0].pop()]
        longest = self._length(batch[0])
        floor = bucket_floor(longest)
        for group in self._groups:
            if not self._fill(batch, group, floor, longest, fits):
                break
        self._groups = deque(group for group in self._groups if group)
        return batch

    def take_pack(self, allows: Callable[[int, int], bool]) -> list[T]:
        """Take the next batch of whatever lengths, longest first; empty when nothing waits.

        `allows` is asked whether so many tokens may go together, and a longest of so many. The
        first request is taken without asking.
        """
        batch: list[T] = []
        longest = tokens = 0
        while self._groups:
            group = self._groups[0]
            length = self._length(group[-1])
            longest, tokens = max(longest, length), tokens + length
            if batch and not allows(tokens, longest):
                break
            batch.append(group.pop())
            if not group:
                self._groups.popleft()
        return sorted(batch, key=self._length, reverse=True)

    def _fill(
        self,
        batch: list[T],
        group: list[T],
        floor: int,
        longest: int,
        fits: Callable[[Sequence[T]], bool],
    ) -> bool:
        """Move requests of length floor < n ≤ longest into the batch; False once it is full."""
        position = bisect_right(group, longest, key=self._length)
        end = position
        full = False
        while position and self._length(group[position - 1]) > floor:
            batch.append(group[position - 1])
            if not fits(batch):
                batch.pop()
                full = True
                break
            position -= 1
        del group[position:end]
        return not full
