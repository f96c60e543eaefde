"""What does the command `halfrate` offer?

Every command imports what it needs when it runs, so that `halfrate --help` answers at once.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from service.cli import keys, models, projects, run
from service.cli.console import DEFAULT_HOME as HOME
from service.cli.console import CommandError, HomeOption, complain, say
from service.stack.part import StackError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # A traceback with local variables would show keys and prompts.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(projects.app, name="project")
app.add_typer(keys.app, name="key")
app.add_typer(models.app, name="models")
app.add_typer(run.app, name="run")


def main() -> None:
    """The console command; exits with 0, with 1 and the reason on stderr, or with 2 for wrong
    usage."""
    try:
        app()
    except (CommandError, StackError) as error:
        complain(str(error))
        sys.exit(1)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            say(version("halfrate"))
        except PackageNotFoundError:  # run from a checkout
            say("not installed")
        raise typer.Exit


@app.callback()
def halfrate(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Offline batch inference for your own GPUs: a JSONL file goes in, a results file comes out."""


@app.command()
def up(
    home: HomeOption = HOME,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the API.", min=1, max=65535, envvar="HALFRATE_PORT"),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is ready.")] = False,
    serve: Annotated[
        str,
        typer.Option(
            envvar="HALFRATE_SERVE", help="Models to serve, by commas; all if empty.", metavar="IDS"
        ),
    ] = "",
) -> None:
    """Start everything that is not brought by URL, and keep watch until Ctrl-C.

    Where it runs already, this fails; with --detach, it waits for that one to be ready.
    """
    from service.cli import up as command  # noqa: PLC0415 - see the first lines

    command.up(home, port=port, detach=detach, serve=serve)


@app.command()
def down(home: HomeOption = HOME) -> None:
    """Stop the stack of this home; its data stays."""
    from service.cli import stack  # noqa: PLC0415 - as above

    stack.down(home)


@app.command()
def status(
    home: HomeOption = HOME,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show every part of the stack, up or down."""
    from service.cli import stack  # noqa: PLC0415 - as above

    stack.status(home, as_json=as_json)


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="A JSONL file of requests.", metavar="FILE")],
    endpoint: Annotated[str, typer.Option(help="The batch's endpoint, e.g. /v1/embeddings.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: an object a line.")
    ] = False,
) -> None:
    """Check an input file as the service would, without one. Exits with 1 where a line is bad."""
    from service.cli import validate as command  # noqa: PLC0415 - as above

    command.validate(file, endpoint, as_json=as_json)


@app.command()
def migrate(
    home: HomeOption = HOME,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION",
            help="Stop there, or go back to it, before an older halfrate is run. Going back loses"
            " what the older tables have no place for.",
        ),
    ] = None,
) -> None:
    """Bring the database to the newest tables."""
    from service.cli import database  # noqa: PLC0415 - as above

    database.migrate(home, to)


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="A folder to be made.", metavar="DIR")],
    home: HomeOption = HOME,
    state_only: Annotated[
        bool, typer.Option("--state-only", help="List the objects, and leave their bytes out.")
    ] = False,
) -> None:
    """Back up the embedded stack, up or down: its state, and the bytes that the state names.

    Not in it: model weights, models.toml, settings, and keys in the clear.
    """
    from service.cli import backup as command  # noqa: PLC0415 - as above

    command.backup(home, folder, with_bytes=not state_only)


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="As `backup` made it.", metavar="DIR")],
    home: HomeOption = HOME,
    replace: Annotated[
        bool, typer.Option("--replace", help="Give up what the home holds.")
    ] = False,
) -> None:
    """Bring a backup into a fresh home whose stack is down; `up` goes on from there."""
    from service.cli import backup as command  # noqa: PLC0415 - as above

    command.restore(home, folder, replace=replace)


@app.command()
def doctor(
    home: HomeOption = HOME,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: an object a line.")
    ] = False,
) -> None:
    """Look for what does not fit together. Exits with 1 where anything is left that does not."""
    from service.cli import doctor as command  # noqa: PLC0415 - as above

    command.doctor(home, fix=fix, as_json=as_json)


if __name__ == "__main__":
    main()
