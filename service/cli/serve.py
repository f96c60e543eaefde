"""How does the API become a server process?"""

import sys

import uvicorn
from pydantic import ValidationError

from service.api.listen import config
from service.cli.console import CommandError
from service.db.migrate import WrongTables, refuse_other_tables
from service.settings import Settings

SWITCH_S = 0.0005
"""A thread that wants the interpreter's lock waits so long for another to give it up; 5 ms unless
told otherwise. A poll takes the lock several times, and beside 16 uploads had its p95 at 206 to 473
ms so, at 130 to 148 ms with this."""


def serve(shutdown_s: int) -> None:
    """Serve until SIGTERM; requests under way then have `shutdown_s` seconds.

    Raises:
        CommandError: a setting is missing or wrong, or the database has other tables.
    """
    try:
        settings = Settings()
    except ValidationError as error:
        faults = [
            f"HALFRATE_{'.'.join(map(str, fault['loc'])).upper()}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise CommandError("\n".join(faults)) from error
    try:
        refuse_other_tables(settings.database_url.get_secret_value())
    except WrongTables as error:
        raise CommandError(str(error)) from error
    sys.setswitchinterval(SWITCH_S)
    server = uvicorn.Server(
        config(
            "service.api.app:app_from_environment",
            factory=True,
            host=settings.host,
            port=settings.port,
            shutdown_s=shutdown_s,
        )
    )
    server.run()
    if not server.started:
        raise CommandError("The API could not start; its log says why.")
