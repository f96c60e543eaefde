"""What is known of one request in flight, and in which order do requests wait?"""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from engine.plan.prefix import Node, Stem
from engine.plan.slots import Slot


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in flight: its prompt, the tokens made so far, and where its own keys stand.

    While it runs, the tokens from `start` on are its own: the first `computed` of them stand in
    `slot`. What comes before them it reads from `stem` and the stems above. `cached` prompt tokens
    were computed for others. Where it is `told`, the scores after each token of its prompt are
    wanted, so it shares none.
    """

    id: Hashable
    prompt: tuple[int, ...]
    max_tokens: int
    node: Node
    made: list[int] = field(default_factory=list)
    stem: Stem | None = None
    start: int = 0
    slot: Slot | None = None
    computed: int = 0
    cached: int | None = None
    preempted: bool = False
    told: bool = False
    gone: bool = False

    @property
    def known(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.made)

    @property
    def missing(self) -> int:
        """Known tokens whose keys and values are not computed yet."""
        return self.known - self.start - self.computed

    @property
    def more(self) -> int:
        """Tokens that may still be made."""
        return self.max_tokens - len(self.made)

    def stems(self) -> list[Stem]:
        """The stems it reads, from the beginning of the prompt."""
        return [] if self.stem is None else self.stem.way_down()

    def tokens(self, begin: int, end: int) -> list[int]:
        """Known tokens from one position to another."""
        split = len(self.prompt)
        made = self.made[max(0, begin - split) : max(0, end - split)]
        return [*self.prompt[begin:end], *made]


class Line:
    """Sequences that wait, group after group; what was preempted comes before all."""

    def __init__(self) -> None:
        self._again: deque[Sequence] = deque()
        self._groups: deque[deque[Sequence]] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        for group in (self._again, *self._groups):
            yield from (sequence for sequence in group if not sequence.gone)

    def add(self, group: Iterable[Sequence]) -> None:
        """Put a group at the end, in this order."""
        self._groups.append(deque(group))

    def put_back(self, sequence: Sequence) -> None:
        """Put one before all others."""
        self._again.appendleft(sequence)

    def first(self) -> Sequence | None:
        """Whose turn it is; it stays until `pop`."""
        while (group := self._front()) is not None:
            if not group:
                self._groups.popleft()
            elif group[0].gone:
                group.popleft()
            else:
                return group[0]
        return None

    def pop(self) -> None:
        """Let the first one leave."""
        group = self._front()
        if group:
            group.popleft()

    def _front(self) -> deque[Sequence] | None:
        if self._again:
            return self._again
        return self._groups[0] if self._groups else None


class Lengths:
    """How long answers turn out to be."""

    def __init__(self, samples: int = 256) -> None:
        self._finished: deque[int] = deque(maxlen=samples)

    def add(self, tokens: int) -> None:
        """Note the length of a finished answer."""
        self._finished.append(tokens)

    def usual(self, limit: int) -> int:
        """Nine in ten are no longer than this, as far as known; at most `limit`."""
        if not self._finished:
            return limit
        ordered = sorted(self._finished)
        return min(limit, ordered[len(ordered) * 9 // 10])


def in_order(group: Collection[Sequence], ways: dict[Sequence, tuple[int, ...]]) -> list[Sequence]:
    """Those that share a stem together; among them those that may run longest first."""
    return sorted(group, key=lambda sequence: (ways[sequence], -sequence.max_tokens))
