"""How large may a batch be, after the device has run out of memory?"""

from dataclasses import dataclass, replace

# Batches in a row that must go well at the ceiling before it is raised: what was short may be so
# for good, and then this bounds the share of batches that are computed in vain.
_CALM = 64


@dataclass(frozen=True, slots=True)
class Budget:
    """Most padded tokens of a batch: `current` now, `ceiling` what it may grow back to.

    Each shortage leaves the ceiling below the cost that failed, so shortages come to an end. It
    rises again slowly, to `limit` at most: memory that another program held may have come free.
    """

    current: int
    ceiling: int
    limit: int
    calm: int = 0  # batches that went well at the ceiling, since it last changed

    @classmethod
    def of(cls, limit: int) -> "Budget":
        """A budget that nothing has cut yet."""
        return cls(current=limit, ceiling=limit, limit=limit)

    def after_out_of_memory(self, cost: int) -> "Budget":
        """Half of what failed; from now on at most three quarters of it.

        One sequence alone may cost more than the ceiling: that tells nothing of what fits below.
        """
        ceiling = max(1, min(self.ceiling, cost * 3 // 4))
        current = max(1, min(self.current, cost) // 2)
        return replace(self, current=current, ceiling=ceiling, calm=0)

    def after_blame(self) -> "Budget":
        """What failed was one request, alone: batches of others may be as large as ever."""
        return replace(self, ceiling=self.limit, calm=0)

    def after_success(self) -> "Budget":
        """Grow back by an eighth of the ceiling; after a calm while, the ceiling by an eighth."""
        if self.current < self.ceiling:
            grown = min(self.ceiling, self.current + max(1, self.ceiling // 8))
            return replace(self, current=grown)
        if self.ceiling == self.limit:
            return self
        if self.calm < _CALM:
            return replace(self, calm=self.calm + 1)
        raised = min(self.limit, self.ceiling + max(1, self.ceiling // 8))
        return replace(self, current=raised, ceiling=raised, calm=0)
