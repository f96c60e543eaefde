"""Which tasks are there? One a stage, each a look into Postgres; thin, because a message is."""

from service.batch import StageName
from worker import assemble as assembling
from worker import clean as cleaning
from worker import plan as planning
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
    run_ready(of_cpu_process(), StageName.CLEAN, cleaning.clean)


@app.task(name="halfrate.tick")
def tick() -> None:
    """Set right what a lost message or a dead worker left."""
    ticking.tick(of_cpu_process())
