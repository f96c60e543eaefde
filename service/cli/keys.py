"""How are API keys made, listed and revoked from the command line?"""

from enum import StrEnum
from typing import Annotated

import typer

from service.cli.console import DEFAULT_HOME, CommandError, HomeOption, complain, say, show_table

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")


class KeyRight(StrEnum):
    """What a key may do; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


@app.command()
def create(
    home: HomeOption = DEFAULT_HOME,
    project: Annotated[str, typer.Option(help="Made where there is none yet.")] = "default",
    name: Annotated[str, typer.Option(help="To know it by.")] = "",
    right: Annotated[KeyRight, typer.Option(help="What it may do.")] = KeyRight.SUBMIT,
) -> None:
    """Make a key and print it, the only time it can be seen."""
    from service.cli.database import opened  # noqa: PLC0415 - `halfrate --help` stays quick
    from service.db import keys  # noqa: PLC0415 - as above
    from service.db.models import Right  # noqa: PLC0415 - as above

    with opened(home) as database, database.transaction() as session:
        owner = keys.project_named(session, project) or keys.create_project(session, project)
        _, plaintext = keys.create_key(session, owner.id, name, Right(right))
    say(plaintext)
    complain("Keep it: it is stored as a hash only.")


@app.command("list")
def list_keys(home: HomeOption = DEFAULT_HOME) -> None:
    """Show every key, revoked ones included; never the key itself."""
    from service.cli.database import opened  # noqa: PLC0415 - as above
    from service.db.keys import keys_of  # noqa: PLC0415 - as above
    from service.db.models import Project  # noqa: PLC0415 - as above
    from service.ids import Prefix, show  # noqa: PLC0415 - as above

    with opened(home) as database, database.transaction() as session:
        rows = [
            [
                show(Prefix.KEY, key.id),
                getattr(session.get(Project, key.project_id), "name", None),
                key.name,
                key.hint,
                key.rights,
                f"{key.created_at:%Y-%m-%d %H:%M}",
                f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else None,
                "revoked" if key.revoked_at else "good",
            ]
            for key in keys_of(session)
        ]
    show_table(["id", "project", "name", "key", "right", "created", "last used", "state"], rows)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `key list` shows it.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """End a key, from its next request on."""
    from service.cli.database import opened  # noqa: PLC0415 - as above
    from service.db import keys  # noqa: PLC0415 - as above
    from service.ids import Prefix, parse  # noqa: PLC0415 - as above

    parsed = parse(Prefix.KEY, key_id)
    if parsed is None:
        raise CommandError(f"{key_id} is not the id of a key; `halfrate key list` shows them.")
    with opened(home) as database, database.transaction() as session:
        revoked = keys.revoke(session, parsed)
    if revoked is None:
        raise CommandError(f"There is no key {key_id}; `halfrate key list` shows them.")
    say(f"{key_id} is revoked.")
