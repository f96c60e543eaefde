"""How does the API become a server process?"""

import uvicorn
from pydantic import ValidationError

from service.api.listen import config
from service.cli.console import CommandError
from service.db.migrate import WrongTables, refuse_other_tables
from service.settings import Settings


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
