"""One stack for all faults, and the table that comes out in the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chaos.client import Sent, create, ended, upload
from tests.e2e.chaos.faults import FAULTS
from tests.e2e.chaos.stack import Stack
from tests.e2e.chaos.table import Table

TABLE = pytest.StashKey[Table]()
OUT = Path("out") / "chaos.md"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All parts of the service, each a process."""
    running = Stack(tmp_path_factory.mktemp("chaos") / "home")
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def at_first(stack: Stack) -> dict[str, tuple[int, int]]:
    """What each part held once batches had gone through all of them, before any fault."""
    for number in range(3):
        ended(stack, create(stack, upload(stack, Sent.of(f"first/{number}"))))
    return stack.footprint()


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    """What the tests write their costs into."""
    return pytestconfig.stash.setdefault(TABLE, Table.kept_in(pytestconfig.rootpath / OUT))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(TABLE, None)
    if found is not None:
        found.write(FAULTS)
        terminalreporter.section("fault × phase")
        terminalreporter.write(found.text(FAULTS))
