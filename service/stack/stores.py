"""How do a home's stores run without its service, for who works on them directly?"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.settings import Settings
from service.stack.home import Home
from service.stack.parts import Secrets, addresses, prepare_embedded
from service.stack.ports import Ports
from service.stack.process import empty_folder
from service.stack.record import outside_files, read_record, recorded_processes
from service.stack.roster import Roster
from service.stack.supervisor import settings_of
from service.stack.sweep import sweep

STORES = ("postgres", "valkey", "seaweedfs")


@contextmanager
def running_stores(home: Home, places: dict[str, Path]) -> Iterator[Settings]:
    """Postgres, Valkey and SeaweedFS, each below the folder that `places` gives for its name; the
    settings name them. Only for the one who holds the home's lock.

    Raises:
        StackError: one of them did not start.
    """
    record = read_record(home)
    sweep(home.root, recorded_processes(record), outside_files(record))
    empty_folder(home.temporary)
    words, ports = Secrets.kept_in(home.secrets), Ports(home.ports)
    roster = Roster(home.root)
    try:
        for name in STORES:
            roster.begin(prepare_embedded(places[name], ports, words)[name])
        roster.await_ready()
        environment = dict(os.environ)  # noqa: TID251 - what a stack of this home would inherit
        yield settings_of(environment | addresses(roster, words))
    finally:
        roster.stop()
        empty_folder(home.temporary)
