"""Which ports do the parts listen on? Free ones, recorded in the home and kept while free."""

import json
import random
import socket
from pathlib import Path

from service.stack.part import StackError
from service.stack.private import write_private

LOOPBACK = "127.0.0.1"
# Below the range that the kernel hands to outgoing connections (32768 and up on Linux): a port
# from there could be taken by any connection while its part restarts.
FIRST, LAST = 18_000, 31_999
TRIES = 200


def is_free(port: int) -> bool:
    """Whether a program could listen on this port of the loopback address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose(but_not: frozenset[int] = frozenset()) -> int:
    """A free port outside `but_not`.

    Raises:
        StackError: none was found.
    """
    for _ in range(TRIES):
        # Two stacks that start together should not run through the same sequence.
        port = random.SystemRandom().randint(FIRST, LAST)
        if port not in but_not and is_free(port):
            return port
    raise StackError(f"No free port found between {FIRST} and {LAST}.")


class Ports:
    """The ports of one home, by name, remembered in a file."""

    def __init__(self, record: Path) -> None:
        self._record = record
        try:
            self._ports: dict[str, int] = json.loads(record.read_text())
        except (FileNotFoundError, ValueError):
            self._ports = {}

    def take(self, name: str) -> int:
        """The recorded port of `name` where it is still free, else a new one, recorded."""
        port = self._ports.get(name)
        if port is None or not is_free(port):
            self.keep(name, choose(frozenset(self._ports.values())))
        return self._ports[name]

    def keep(self, name: str, port: int) -> None:
        """Record a port that was chosen elsewhere."""
        self._ports[name] = port
        write_private(self._record, json.dumps(self._ports, indent=1) + "\n")
