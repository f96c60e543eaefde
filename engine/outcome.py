"""What does one step of an encode or generate loop hand back?"""

from dataclasses import dataclass, field

from engine.request import Result
from engine.surface import Counters


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results a step finished, and what the work cost."""

    results: tuple[Result, ...] = ()
    cost: Counters = field(default_factory=Counters)
