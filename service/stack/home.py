"""What lies where in the home of a stack, and who may change it?"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.stack.part import StackError

LOCK_TRIES_S = 1.0
KEPT = ("postgres", "seaweedfs")
"""Folders of the stores whose contents outlive a stack."""


class HomeTaken(StackError):
    """Another supervisor runs this home."""


@dataclass(frozen=True, slots=True)
class Home:
    """The paths below one home."""

    root: Path

    @classmethod
    def at(cls, root: Path) -> "Home":
        """The home at this path, made absolute; it need not exist yet."""
        return cls(root.expanduser().resolve())

    @property
    def record(self) -> Path:
        """What `status`, `down` and the key commands read; mode 600."""
        return self.root / "stack.json"

    @property
    def client_env(self) -> Path:
        """What an OpenAI client needs, to be sourced by a shell; mode 600."""
        return self.root / "client.env"

    @property
    def secrets(self) -> Path:
        """The generated passwords; mode 600."""
        return self.root / "secrets.json"

    @property
    def ports(self) -> Path:
        """The chosen ports."""
        return self.root / "ports.json"

    @property
    def temporary(self) -> Path:
        """TMPDIR of every part, emptied at each start."""
        return self.root / "tmp"

    @property
    def up_log(self) -> Path:
        """What a detached `up` says."""
        return self.root / "logs" / "up.log"

    @property
    def has_data(self) -> bool:
        """Whether stores of it hold anything."""
        return any((self.root / name).exists() for name in KEPT)

    @property
    def lock(self) -> Path:
        """Held by the supervisor as long as it lives; holds its pid."""
        return self.root / "lock"


@contextmanager
def locked(home: Home) -> Iterator[None]:
    """Be the only supervisor of this home. The kernel gives the lock back however we end.

    Raises:
        HomeTaken: there is one already.
    """
    home.root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _taken(descriptor):
            raise HomeTaken(str(home.root))
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(home: Home) -> int | None:
    """The pid of the supervisor that runs this home, None where none does.

    The lock says so, not the pid, which might be somebody else's by now.
    """
    try:
        descriptor = os.open(home.lock, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # It writes its pid right after taking the lock.
            return int(os.pread(descriptor, 32, 0) or b"0") or None
        return None
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    # Whoever asks for the holder has the lock for a moment too.
    until = time.monotonic() + LOCK_TRIES_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        else:
            return True
