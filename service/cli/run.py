"""How is one process of the service run, in production as in the embedded stack?

Each command becomes the process it names: its pid is the one that was started.
"""

import os
import sys
from typing import Annotated, Never

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Run one process of the service; settings come from HALFRATE_* variables.",
)
CELERY = (sys.executable, "-m", "celery", "-A")
# Workers find one another through Postgres; these would only talk over the broker.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
SHUTDOWN_S = 10


@app.command()
def api() -> None:
    """The HTTP API, on HALFRATE_HOST and HALFRATE_PORT."""
    from service.cli.serve import serve  # noqa: PLC0415 - `halfrate --help` stays quick

    serve(SHUTDOWN_S)


@app.command()
def cpu(
    concurrency: Annotated[
        int, typer.Option(min=3, envvar="HALFRATE_CPU_SLOTS", help="Processes.")
    ] = 4,
) -> None:
    """A CPU worker: validates, plans, assembles, calls webhooks. Any number may run."""
    queues = ("-Q", "cpu", "-P", "prefork", "-c", str(concurrency))
    _become(*CELERY, "worker.app", "worker", *queues, *QUIET, "-n", f"cpu-{os.getpid()}@%h")


@app.command()
def engine(
    model: Annotated[list[str], typer.Option(metavar="ID", help="A model to serve; repeatable.")],
    slots: Annotated[
        int, typer.Option(min=1, envvar="HALFRATE_SLOTS", help="Shards at once, per model.")
    ] = 2,
) -> None:
    """An engine worker: runs the lines of these models. Best one a GPU."""
    queues = ",".join(f"engine.{name}" for name in model)
    # A thread for each shard that may be run at once (`worker.drain.MORE`), and for wakes in vain.
    threads = ("-Q", queues, "-P", "threads", "-c", str((4 * slots + 2) * len(model)))
    name = ("-n", f"engine-{os.getpid()}@%h")
    _become(
        *CELERY,
        "worker.engine_app",
        "worker",
        *threads,
        *QUIET,
        *name,
        HALFRATE_SERVE=",".join(model),
    )


@app.command()
def beat() -> None:
    """The clock: exactly one may run."""
    _become(*CELERY, "worker.app", "beat", "--pidfile=")


def _become(*command: str, **variables: str) -> Never:
    sys.stdout.flush()
    environment = {**os.environ, **variables}  # noqa: TID251 - handed on to what we become
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted
