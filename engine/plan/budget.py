"""How large may a batch be, after the device has run out of memory?"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Budget:
    """Most padded tokens of a batch: `current` now, `ceiling` what it may grow back to.

    Each shortage lowers the ceiling below the cost that failed, so shortages come to an end.
    """

    current: int
    ceiling: int

    @classmethod
    def of(cls, limit: int) -> "Budget":
        """A budget that nothing has cut yet."""
        return cls(current=limit, ceiling=limit)

    def after_out_of_memory(self, cost: int) -> "Budget":
        """Half of what failed; from now on at most three quarters of it."""
        failed = max(1, min(self.ceiling, cost))
        return Budget(
            current=max(1, min(self.current, failed) // 2), ceiling=max(1, failed * 3 // 4)
        )

    def after_success(self) -> "Budget":
        """Grow back by an eighth of the ceiling."""
        grown = min(self.ceiling, self.current + max(1, self.ceiling // 8))
        return replace(self, current=grown)
