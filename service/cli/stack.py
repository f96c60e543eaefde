"""How do `up`, `down` and `status` show the stack?"""

import json
from pathlib import Path

from service.cli.console import CommandError, say, show_table
from service.settings import Files
from service.stack.control import down as end
from service.stack.control import up_detached
from service.stack.home import Home, HomeTaken, holder
from service.stack.part import PartState
from service.stack.record import read_record
from service.stack.record import status as parts_of
from service.stack.supervisor import UpOptions, part_names, served_models
from service.stack.supervisor import up as supervise


def up(home: Path, *, port: int | None, detach: bool, serve: str) -> None:
    """Supervise the home's stack here, or start a supervisor that outlives us."""
    place = Home.at(home)
    models = _ids(serve)
    if detach:
        running = holder(place) is not None
        arguments = [f"--port={port}"] if port else []
        url = up_detached(place, [*arguments, f"--serve={','.join(models)}"])
        say(f"halfrate {'is already up' if running else 'is up'} at {url}")
        say(f"For an OpenAI client: set -a; . {place.client_env}; set +a")
        return
    try:
        supervise(place, UpOptions(port=port, serve=models), say)
    except HomeTaken as error:
        known = read_record(place).url
        where = f"at {known}" if known else "and is starting"
        raise CommandError(f"halfrate already runs in {place.root} {where}.") from error


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
    names = part_names(served_models(Files(), ()))
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


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
