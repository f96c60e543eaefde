"""How large may a batch be, after the device has run out of memory?"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Budget:
    """Most padded tokens of a batch: `current` now, `ceiling` what it may grow back to.

    Each shortage leaves the ceiling below the cost that failed, so shortages come to an end.
    """

    current: int
    ceiling: int

    @classmethod
    def of(cls, limit: int) -> "Budget":
        """A budget that nothing has cut yet."""
        return cls(current=limit, ceiling=limit)

    def after_out_of_memory(self, cost: int) -> "Budget":
        """Half of what failed; from now on at most three quarters of it.

        One sequence alone may cost more than the ceiling: that tells nothing of what fits below.
        """
        ceiling = max(1, min(self.ceiling, cost * 3 // 4))
        return Budget(current=max(1, min(self.current, cost) // 2), ceiling=ceiling)

    def after_success(self) -> "Budget":
        """Grow back by an eighth of the ceiling."""
        grown = min(self.ceiling, self.current + max(1, self.ceiling // 8))
        return replace(self, current=grown)
