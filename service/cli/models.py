"""How are the served models listed and fetched from the command line?"""

from typing import Annotated

import typer

from service.cli.console import CommandError, say, show_table

app = typer.Typer(no_args_is_help=True, help="List and fetch the models of the catalog.")


@app.command("list")
def list_models() -> None:
    """Show the models of the catalog, and which of them are in the cache."""
    from service.catalog import StubSource  # noqa: PLC0415 - `halfrate --help` stays quick
    from service.settings import Files  # noqa: PLC0415 - as above
    from service.stack.choice import served_models  # noqa: PLC0415 - as above

    files = Files()
    rows = []
    for model in served_models(files):
        present = isinstance(model.origin, StubSource) or model.folder(files.models).exists()
        price = f"{model.price_input} / {model.price_output}"
        rows.append([model.id, model.kind.value, price, "yes" if present else "no", model.source])
    show_table(["model", "kind", "$ per million in / out", "fetched", "source"], rows)


@app.command()
def pull(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="All, where none is named.")
    ] = None,
) -> None:
    """Fetch models into the cache that all homes share."""
    import subprocess  # noqa: PLC0415 - as above
    import sys  # noqa: PLC0415 - as above

    from service.settings import Files  # noqa: PLC0415 - as above
    from service.stack.choice import served_models  # noqa: PLC0415 - as above

    for model in served_models(Files(), tuple(ids or ())):
        say(f"Fetching {model.id} …")
        # A process of its own: what converts models is the worker's, which this layer knows not.
        ended = subprocess.run(
            [sys.executable, "-m", "worker.models", "pull", model.id], check=False
        )
        if ended.returncode:
            raise CommandError(f"{model.id} could not be fetched.")
