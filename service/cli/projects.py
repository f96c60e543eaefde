"""How are projects, the tenants, made and listed from the command line?"""

from typing import Annotated

import typer

from service.cli.console import DEFAULT_HOME, CommandError, HomeOption, say, show_table

app = typer.Typer(no_args_is_help=True, help="Make and list projects: each sees only its own.")

LONGEST_NAME = 64


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its own; no two share one.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Make a project and print its id; `halfrate key create --project NAME` lets someone in."""
    from sqlalchemy.exc import IntegrityError  # noqa: PLC0415 - `halfrate --help` stays quick

    from service.cli.database import opened  # noqa: PLC0415 - as above
    from service.db.keys import create_project  # noqa: PLC0415 - as above
    from service.ids import Prefix, show  # noqa: PLC0415 - as above

    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise CommandError(f"A project's name has 1 to {LONGEST_NAME} printable characters.")
    try:
        with opened(home) as database, database.transaction() as session:
            project = create_project(session, name)
    except CommandError as error:
        if isinstance(error.__cause__, IntegrityError):
            raise CommandError(f"There is a project '{name}' already.") from error
        raise
    say(show(Prefix.PROJECT, project.id))


@app.command("list")
def list_projects(home: HomeOption = DEFAULT_HOME) -> None:
    """Show every project, with its good keys and when one was last used."""
    from service.cli.database import opened  # noqa: PLC0415 - as above
    from service.db.keys import projects  # noqa: PLC0415 - as above
    from service.ids import Prefix, show  # noqa: PLC0415 - as above

    with opened(home) as database, database.transaction() as session:
        rows = [
            [
                show(Prefix.PROJECT, each.project.id),
                each.project.name,
                f"{each.project.created_at:%Y-%m-%d %H:%M}",
                each.good_keys,
                f"{each.last_used_at:%Y-%m-%d %H:%M}" if each.last_used_at else None,
            ]
            for each in projects(session)
        ]
    show_table(["id", "name", "created", "good keys", "last used"], rows)
