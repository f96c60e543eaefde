"""What is the Celery app of engine workers? One process a GPU, threads, a queue a model.

HALFRATE_SERVE=<model> celery -A worker.engine_app worker -P threads -Q engine.<model>
"""

from contextlib import ExitStack
from functools import cache
from typing import Any

from celery import signals

from service import logs
from service.settings import Settings
from worker.broker import make_app
from worker.engine_process import EngineProcess, serving
from worker.resources import of_engine_process

app = make_app(Settings(), include=())


@app.task(name="halfrate.drain")
def drain(model: str) -> None:
    """Run shards of that model until none is runnable."""
    engine_process().drain(model)


@cache
def _life() -> ExitStack:
    """What an engine worker holds from its start to its end."""
    return ExitStack()


@cache
def engine_process() -> EngineProcess:
    """The models of this engine worker, loaded on the first call."""
    return _life().enter_context(serving(of_engine_process()))


@signals.worker_init.connect
def _load_models(**_: Any) -> None:  # noqa: ANN401 - Celery's signals hand over what they like
    # Before the first message is taken, and before Celery sets logging up.
    logs.configure(Settings().log_level)
    engine_process()


@signals.worker_shutting_down.connect
def _hand_back(**_: Any) -> None:  # noqa: ANN401 - as above
    engine_process().stop()


@signals.worker_shutdown.connect
def _leave(**_: Any) -> None:  # noqa: ANN401 - as above
    _life().close()
