"""Which parts of a stack run, and what happens when one falls? It is started again, more slowly
each time."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from service.stack.part import Part, PartState, StackError
from service.stack.ports import is_free
from service.stack.process import MARKER, Child, start, stop, tail, trim

PORT_TRIES = 3
POLL_S = 0.1
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0

# Prepares a part; called again, for other ports, where the first ones were taken meanwhile.
Prepare = Callable[[], Part]


def delay(falls: int) -> float:
    """Seconds to wait before the start after so many falls in a row, 1 for the first."""
    return float(min(FIRST_DELAY_S * 2 ** (min(falls, 20) - 1), LONGEST_DELAY_S))


@dataclass(slots=True)
class Member:
    """One part, its process, and how it has fared."""

    prepare: Prepare
    part: Part
    child: Child | None
    state: PartState = PartState.STARTING
    was_ready: bool = False  # a part that never was is not restarted: its configuration is wrong
    tries: int = 1
    restarts: int = 0
    falls: int = 0  # since it last ran steadily
    start_at: float = 0.0

    @property
    def pid(self) -> int | None:
        """The pid, while there is a process."""
        return None if self.child is None or self.child.ended() else self.child.pid


class Roster:
    """The parts of one stack, in starting order."""

    def __init__(
        self,
        home: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`say` gets what a person should read, `changed` is called after each change of state."""
        self._home = home
        self._say = say
        self._changed = changed
        self.members: list[Member] = []

    def log(self, name: str) -> Path:
        """Where the part of this name writes."""
        return self._home / "logs" / f"{name}.log"

    def begin(self, prepare: Prepare) -> Part:
        """Start a part, and do not wait until it is ready."""
        part = prepare()
        self.members.append(Member(prepare, part, self._start(part)))
        self._changed()
        return part

    def part(self, name: str) -> Part:
        """The part of this name, with the ports that it has now."""
        return next(member.part for member in self.members if member.part.name == name)

    def await_ready(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Keep watch until every part is ready.

        Raises:
            StackError: a part ended before it ever was, or took too long, or we were interrupted.
        """
        while not all(member.state is PartState.RUNNING for member in self.members):
            if interrupted():
                raise StackError("Stopped while starting.")
            self.tick()
            time.sleep(POLL_S)

    def tick(self) -> None:
        """Look at every part once: note who is ready, start again who fell.

        Raises:
            StackError: a part ended before it ever was ready, or took too long.
        """
        for member in self.members:
            before = member.state
            self._look_at(member)
            if member.state is not before:
                self._changed()

    def stop(
        self, names: Iterable[str] | None = None, hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """Stop these parts side by side; all of them where no names are given."""
        chosen = None if names is None else set(names)
        members = [
            member for member in self.members if chosen is None or member.part.name in chosen
        ]
        stop([member.child for member in members if member.child is not None], hurried)
        for member in members:
            member.child = None
            member.state = PartState.STOPPED
        self._changed()

    def _look_at(self, member: Member) -> None:
        now = time.monotonic()
        if member.state is PartState.RESTARTING and now >= member.start_at:
            self._start_again(member)
        child = member.child
        if child is None:
            return
        age = now - child.started
        if child.ended():
            self._fell(member, child, f"ended with {child.process.returncode}")
        elif member.state is PartState.STARTING and member.part.ready(child.pid):
            member.state = PartState.RUNNING
            member.was_ready = True
        elif member.state is PartState.STARTING and age > member.part.start_s:
            self._fell(member, child, f"was not ready after {member.part.start_s:g} s")
        elif member.state is PartState.RUNNING and age > STEADY_S:
            member.falls = 0
            trim(self.log(member.part.name))

    def _fell(self, member: Member, child: Child, how: str) -> None:
        child.kill()
        member.child = None
        story = self._story(member.part.name, how)
        if not member.was_ready:
            self._start_elsewhere(member, story)
            return
        member.restarts += 1
        self._wait(member, story)

    def _wait(self, member: Member, story: str) -> None:
        member.falls += 1
        wait = delay(member.falls)
        member.start_at = time.monotonic() + wait
        member.state = PartState.RESTARTING
        self._say(f"{story}\n{member.part.name} is started again in {wait:g} s.")

    def _start_again(self, member: Member) -> None:
        try:
            member.child = self._start(member.part)
        except OSError as error:  # no memory, too many processes: that passes
            self._wait(member, f"{member.part.name} could not be started: {error.strerror}.")
        else:
            member.state = PartState.STARTING

    def _start_elsewhere(self, member: Member, story: str) -> None:
        if member.tries == PORT_TRIES or all(is_free(port) for port in member.part.ports):
            raise StackError(story)
        member.tries += 1
        member.part = member.prepare()
        member.child = self._start(member.part)

    def _start(self, part: Part) -> Child:
        part.before_start()
        return start(part, log=self.log(part.name), environment=self._environment())

    def _environment(self) -> dict[str, str]:
        return {MARKER: str(self._home), "TMPDIR": str(self._home / "tmp")}

    def _story(self, name: str, how: str) -> str:
        log = self.log(name)
        lines = [f"  | {line}" for line in tail(log)]
        return "\n".join([f"{name} {how}. The end of {log}:", *lines])
