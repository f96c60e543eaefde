"""What is known of a stack from outside? Its record, written at each change of state."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from service.stack.home import Home, holder
from service.stack.part import PartState
from service.stack.private import write_private
from service.stack.roster import Member
from service.stack.sweep import is_same


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """One part as `halfrate status` shows it, and what a sweep needs besides."""

    name: str
    pid: int | None
    port: int | None
    url: str | None
    state: PartState
    restarts: int
    created: float | None = None  # start time of the process, which its pid alone does not name
    outside: tuple[str, ...] = ()

    def shown(self) -> dict[str, str | int | None]:
        """The keys that `status --json` promises."""
        return {
            "name": self.name,
            "pid": self.pid,
            "port": self.port,
            "url": self.url,
            "state": self.state.value,
            "restarts": self.restarts,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """All of it. `environment` holds secrets: addresses with passwords, keys."""

    supervisor: int | None = None  # its pid; whether it lives, the home's lock says
    ready: bool = False
    names: tuple[str, ...] = ()  # of every part, those not yet started included
    url: str | None = None  # of the API
    environment: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[PartRecord, ...] = ()


def write_record(home: Home, record: StackRecord) -> None:
    """Replace the record in one step."""
    write_private(home.record, json.dumps(asdict(record), indent=1) + "\n")


def read_record(home: Home) -> StackRecord:
    """The record as it was last written; an empty one where there is none."""
    try:
        held = json.loads(home.record.read_text())
        parts = tuple(
            PartRecord(
                **{**part, "state": PartState(part["state"]), "outside": tuple(part["outside"])}
            )
            for part in held.pop("parts")
        )
        return StackRecord(parts=parts, names=tuple(held.pop("names")), **held)
    except FileNotFoundError:
        return StackRecord()
    except (ValueError, TypeError, KeyError):
        # Of another version of this program: what it holds cannot be trusted to be found.
        return StackRecord()


def part_record(member: Member) -> PartRecord:
    """What is to be known of a member of the roster."""
    part, child = member.part, member.child
    return PartRecord(
        name=part.name,
        pid=member.pid,
        port=part.port,
        url=part.url,
        state=member.state,
        restarts=member.restarts,
        created=None if child is None else child.created,
        outside=tuple(map(str, part.outside)),
    )


def recorded_processes(record: StackRecord) -> list[tuple[int, float]]:
    """(pid, start time) of every part that ran."""
    return [(part.pid, part.created) for part in record.parts if part.pid and part.created]


def outside_files(record: StackRecord) -> list[Path]:
    """Files that the parts keep outside the home while they run."""
    return [Path(path) for part in record.parts for path in part.outside]


def status(home: Home, names: Sequence[str]) -> list[PartRecord]:
    """Every part of the home, up or down; `names` are those to name where it was never up."""
    record = read_record(home)
    supervised = holder(home) is not None
    parts = {part.name: _now(part, supervised=supervised) for part in record.parts}
    return [parts.get(name) or _stopped(name) for name in record.names or names]


def _now(part: PartRecord, *, supervised: bool) -> PartRecord:
    if part.pid is not None and part.created is not None and is_same(part.pid, part.created):
        return part
    if supervised and part.state is not PartState.STOPPED:
        # It fell, and its supervisor is about to notice.
        return replace(part, pid=None, state=PartState.RESTARTING)
    return replace(part, pid=None, state=PartState.STOPPED)


def _stopped(name: str) -> PartRecord:
    return PartRecord(name=name, pid=None, port=None, url=None, state=PartState.STOPPED, restarts=0)
