"""Who had the cores of the machine while something was measured, and who waited for one?"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Share:
    """Of one core, over the time: what was had, and what was wanted and not had."""

    had: float
    waited: float


@dataclass(frozen=True)
class Reading:
    """Seconds on a core, and seconds runnable without one, of some processes up to a moment."""

    had: float
    waited: float


OTHERS = "others and kernel"


def read(owners: Mapping[str, int]) -> dict[str, Reading]:
    """By name, of each process and of all that it has started; and of whatever else there is."""
    found = {name: _read(pid) for name, pid in owners.items()}
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    found[OTHERS] = Reading(busy - sum(each.had for each in found.values()), 0)
    return found


def shares(
    before: Mapping[str, Reading], after: Mapping[str, Reading], seconds: float
) -> dict[str, Share]:
    """What lies between two readings."""
    return {
        name: Share(
            round((after[name].had - before[name].had) / seconds, 2),
            round((after[name].waited - before[name].waited) / seconds, 2),
        )
        for name in before
    }


def _read(pid: int) -> Reading:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return Reading(0, 0)
    had = waited = 0.0
    for each in family:
        for thread in Path(f"/proc/{each.pid}/task").glob("*/schedstat"):
            try:
                on, off, _ = thread.read_text().split()
            except OSError:  # it has ended meanwhile
                continue
            had += int(on) / 1e9
            waited += int(off) / 1e9
    return Reading(had, waited)
