"""Which tasks are there? One a stage or duty: a look into Postgres; thin, because a message is."""

from functools import cache

from service.batch import StageName
from service.outbound import Sender
from worker import assemble as assembling
from worker import clean as cleaning
from worker import deliver as delivering
from worker import leftovers
from worker import plan as planning
from worker import remove as removing
from worker import tick as ticking
from worker import validate as validating
from worker.app import app
from worker.resources import of_cpu_process
from worker.stages import run_ready


@app.task(name="halfrate.validate")
def validate() -> None:
    """Validate what is to be validated."""
    run_ready(of_cpu_process(), StageName.VALIDATE, validating.validate)


@app.task(name="halfrate.plan")
def plan() -> None:
    """Plan what is to be planned."""
    run_ready(of_cpu_process(), StageName.PLAN, planning.plan)


@app.task(name="halfrate.assemble")
def assemble() -> None:
    """Assemble what is decided."""
    run_ready(of_cpu_process(), StageName.ASSEMBLE, assembling.assemble)


@app.task(name="halfrate.clean")
def clean() -> None:
    """Remove what ended batches left."""
    cleaning.clean_ready(of_cpu_process())


@app.task(name="halfrate.remove")
def remove() -> None:
    """Remove the rows of deleted batches."""
    run_ready(of_cpu_process(), StageName.REMOVE, removing.remove)


@app.task(name="halfrate.deliver")
def deliver() -> None:
    """Tell webhook endpoints what they are to be told."""
    delivering.deliver(of_cpu_process(), _sender())


@app.task(name="halfrate.tick")
def tick() -> None:
    """Set right what a lost message or a dead worker left."""
    ticking.tick(of_cpu_process())


@app.task(name="halfrate.sweep")
def sweep() -> None:
    """Remove the bytes that nobody needs."""
    leftovers.sweep_all(of_cpu_process())


@app.task(name="halfrate.abort_abandoned")
def abort_abandoned() -> None:
    """Give up what nobody will finish writing."""
    leftovers.abort_abandoned(of_cpu_process())


@cache
def _sender() -> Sender:
    """This process's own: reading certificates takes a while."""
    return Sender.open(private_addresses=of_cpu_process().settings.webhook_private_addresses)
