"""What did each fault cost, in each phase? Noted by the tests, told as one table."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.chaos.phases import Phase

HEAD = """\
Each cell: lines lost · lines that an engine ran again · seconds from the fault to the batch's end.
A lease of 3 s, write-backs every 0.3 s, 41 lines of which half were flushed when the fault came.
"""


@dataclass(frozen=True)
class Cost:
    """What one fault cost in one phase."""

    lost: int
    redone: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.lost} · {self.redone} · {self.seconds:.1f} s"


@dataclass
class Table:
    """Fault × phase. Cells of an earlier run stand until they are written again."""

    file: Path
    cells: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def kept_in(cls, file: Path) -> "Table":
        """As the last run left it."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
        return cls(
            file,
            {
                (name, phase): cell
                for name, *cells in rows
                for phase, cell in zip(Phase, cells, strict=False)
                if "·" in cell
            },
        )

    def note(self, name: str, phase: Phase, cost: Cost) -> None:
        """What that fault cost there."""
        self.cells[name, phase] = str(cost)

    def text(self, faults: Iterable[str]) -> str:
        """As Markdown."""
        rows = [["fault", *Phase], ["---"] * (1 + len(Phase))]
        rows += [[name, *(self.cells.get((name, each), "") for each in Phase)] for name in faults]
        return HEAD + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def write(self, faults: Iterable[str]) -> None:
        """Keep it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.text(faults), encoding="utf-8")
