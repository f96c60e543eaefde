"""How do `down` and `status` show the stack?"""

import json
from pathlib import Path

from service.cli.console import say, show_table
from service.settings import Files
from service.stack.choice import part_names, served_models
from service.stack.control import down as end
from service.stack.home import Home, holder
from service.stack.part import PartState
from service.stack.record import status as parts_of


def down(home: Path) -> None:
    """Stop the home's stack, and say what was found."""
    place = Home.at(home)
    ended = end(place)
    if ended is None:
        say("halfrate is down.")
    elif ended:
        say(f"halfrate had lost its supervisor; {ended} processes were ended.")
    else:
        say(f"halfrate does not run in {place.root}.")


def status(home: Path, *, as_json: bool) -> None:
    """Every part, as a table or as one JSON object."""
    place = Home.at(home)
    names = part_names(served_models(Files()))
    parts = parts_of(place, names)
    if as_json:
        print(json.dumps({"parts": [part.shown() for part in parts]}))  # noqa: T201 - for programs
        return
    show_table(
        ["part", "state", "pid", "url", "restarts"],
        [
            [part.name, part.state.value, part.pid, part.url, part.restarts or None]
            for part in parts
        ],
    )
    if any(part.state is not PartState.STOPPED for part in parts) and holder(place) is None:
        say("Its supervisor is gone: `halfrate up` or `halfrate down` ends what it left.")
