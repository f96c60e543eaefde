"""Which stretch of the KV memory does each sequence hold, and who else reads it?

The memory is a row of tokens, cut into slabs of equal size. A slab serves slots of one size while
any of them is held, so that slots of a size lie side by side and one call of attention can read
them together; an empty slab serves any size again. What is longer than a slab takes several, side
by side. A slot is freed when its last holder lets go of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from engine.plan.buckets import bucket_of

# The widest divides by every bucket up to 1,024 tokens, so neighbouring slabs of one size line up.
_SLABS = (3072, 1536, 768, 384, 192, 96, 48)
# With fewer slabs than this, a few sizes in use would leave no slab to the others.
_FEWEST_SLABS = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens `start` to `start + size` of the memory."""

    start: int
    size: int


def slab_size(tokens: int) -> int:
    """How long the slabs of a memory of so many tokens are."""
    return next((size for size in _SLABS if tokens >= _FEWEST_SLABS * size), _SLABS[-1])


class Slots:
    """The books of a KV memory of `tokens` tokens, rounded up to whole slabs."""

    def __init__(self, tokens: int) -> None:
        self._slab = slab_size(tokens)
        count = -(-tokens // self._slab)
        self.total = count * self._slab
        self.held = 0  # tokens in slots that somebody holds
        self._empty = [True] * count  # by slab
        self._used: dict[int, int] = {}  # by slab that is cut into slots: how many are held
        self._free: dict[int, list[int]] = {}  # by size: where free slots start, a heap
        self._holders: dict[Slot, int] = {}

    @property
    def holders(self) -> Iterator[tuple[Slot, int]]:
        """Each slot in use, and how many hold it."""
        yield from self._holders.items()

    def rounded(self, length: int) -> int:
        """Size of the slot that so many tokens get."""
        size = bucket_of(length)
        return size if size <= self._slab else -(-length // self._slab) * self._slab

    def take(self, length: int) -> Slot | None:
        """A slot for so many tokens, held once; None where there is no room."""
        size = self.rounded(length)
        start = self._take_slabs(size // self._slab) if size > self._slab else self._take_one(size)
        if start is None:
            return None
        slot = Slot(start, size)
        self._holders[slot] = 1
        self.held += size
        return slot

    def share(self, slot: Slot) -> None:
        """Hold it once more."""
        self._holders[slot] += 1

    def release(self, slot: Slot) -> None:
        """Let go of it once; the last holder frees it."""
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        del self._holders[slot]
        self.held -= slot.size
        slab = slot.start // self._slab
        if slot.size > self._slab:
            for number in range(slab, slab + slot.size // self._slab):
                self._empty[number] = True
            return
        heappush(self._free[slot.size], slot.start)
        self._used[slab] -= 1
        if not self._used[slab]:
            self._empty_slab(slab, slot.size)

    def _take_one(self, size: int) -> int | None:
        """The lowest free slot of this size, of a new slab if need be."""
        free = self._free.setdefault(size, [])
        if not free:
            slab = next((number for number, empty in enumerate(self._empty) if empty), None)
            if slab is None:
                return None
            self._empty[slab] = False
            self._used[slab] = 0
            begin = slab * self._slab
            free.extend(range(begin, begin + self._slab - size + 1, size))
        start = heappop(free)
        self._used[start // self._slab] += 1
        return start

    def _take_slabs(self, count: int) -> int | None:
        """The first so many empty slabs side by side."""
        run = 0
        for number, empty in enumerate(self._empty):
            run = run + 1 if empty else 0
            if run == count:
                begin = number + 1 - count
                self._empty[begin : number + 1] = [False] * count
                return begin * self._slab
        return None

    def _empty_slab(self, slab: int, size: int) -> None:
        """Let a slab without held slots serve any size again."""
        del self._used[slab]
        self._empty[slab] = True
        kept = [start for start in self._free[size] if start // self._slab != slab]
        heapify(kept)
        self._free[size] = kept
