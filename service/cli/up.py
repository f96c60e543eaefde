"""How does `up` show the stack coming to life?"""

import sys
from contextlib import suppress
from pathlib import Path

from service.cli.console import CommandError, say
from service.stack.control import up_detached
from service.stack.home import Home, HomeTaken, holder
from service.stack.record import read_record
from service.stack.supervisor import UpOptions
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
        supervise(place, UpOptions(port=port, serve=models), _tell)
    except HomeTaken as error:
        known = read_record(place).url
        where = f"at {known}" if known else "and is starting"
        raise CommandError(f"halfrate already runs in {place.root} {where}.") from error


def _tell(text: str) -> None:
    # The reader may be gone, a closed terminal for one. Then there is the more reason to go on and
    # stop every part in order.
    with suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
