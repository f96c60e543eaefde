"""In which shape does a pack run, where each shape is captured once and then only replayed?"""

from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 1024  # tokens; what is smaller is the rest of a file, and rare


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Room for a pack: tokens, sequences, and the tokens of one sequence."""

    tokens: int
    rows: int
    longest: int


def shape_of(lengths: Sequence[int], *, budget: int) -> Shape | None:
    """The smallest shape that holds sequences of these lengths; None where none does.

    Tokens are rounded up by sixteenths of a power of two, so at most 6 % of them belong to nobody;
    a full pack is `budget`, whatever that is. Room for sequences costs next to nothing, and is
    rounded up to powers of two.
    """
    tokens = sum(lengths)
    if not _SMALLEST <= tokens <= budget:
        return None
    step = 1 << max(0, (tokens - 1).bit_length() - 5)
    return Shape(
        tokens=min(budget, -(-tokens // step) * step),
        rows=_power_of_two(len(lengths)),
        longest=_power_of_two(max(lengths)),
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
