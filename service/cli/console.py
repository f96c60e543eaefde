"""How does the command speak? Results on stdout, one clear line on stderr where it fails."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HomeOption = Annotated[
    Path,
    typer.Option(
        "--home", envvar="HALFRATE_HOME", help="Folder that holds the stack's state.", metavar="DIR"
    ),
]
DEFAULT_HOME = Path(".halfrate")


class CommandError(Exception):
    """The command cannot do what was asked. The message is shown as it is."""


def say(text: str) -> None:
    """One message; nothing in it is markup, and long words are not broken."""
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


def complain(text: str) -> None:
    """The reason of a failure."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def show_table(columns: list[str], rows: list[list[Any]]) -> None:
    """Rows under headings; None is shown as a dash."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    console = Console()
    # A pipe has no width; cutting words there would cut what a script reads.
    width = console.width if console.is_terminal else 400
    Console(width=width, highlight=False).print(table)
