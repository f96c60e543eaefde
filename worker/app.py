"""How do Celery and its beat run the workers? Messages wake; Postgres decides.

Acked early, results ignored, a message holds no work: losing or doubling one changes nothing.

    celery -A worker.app worker -P prefork -Q cpu                 CPU worker
    celery -A worker.app worker -P threads -Q engine.<model>      engine worker (HALFRATE_SERVE)
    celery -A worker.app beat                                     exactly one
"""

from contextlib import ExitStack
from functools import cache
from typing import Any

from celery import Celery, signals

from service import logs
from service.settings import Settings
from service.wake import CPU_QUEUE
from worker import resources
from worker.engine_process import EngineProcess, serving
from worker.settings import WorkerSettings


def _make() -> Celery:
    settings = Settings()
    app = Celery("halfrate", broker=settings.redis_url.get_secret_value(), include=["worker.tasks"])
    app.conf.update(
        task_ignore_result=True,
        task_acks_late=False,
        task_default_queue=CPU_QUEUE,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        beat_schedule={
            "tick": {
                "task": "halfrate.tick",
                "schedule": settings.tick_s,
                # A tick that waited longer than the next few is worth nothing.
                "options": {"queue": CPU_QUEUE, "expires": settings.tick_s * 3},
            }
        },
    )
    return app


app = _make()


@signals.setup_logging.connect
def _log(**_: Any) -> None:  # noqa: ANN401 - Celery's signals hand over what they like
    logs.configure(Settings().log_level)


@cache
def _life() -> ExitStack:
    """What an engine worker holds from its start to its end."""
    return ExitStack()


@cache
def engine_process() -> EngineProcess:
    """The models of this engine worker, loaded on the first call."""
    return _life().enter_context(serving(resources.of_engine_process()))


@signals.worker_init.connect
def _load_models(**_: Any) -> None:  # noqa: ANN401
    # Before the first message is taken. A CPU worker serves no model.
    if WorkerSettings().serve:
        engine_process()


@signals.worker_shutting_down.connect
def _hand_back(**_: Any) -> None:  # noqa: ANN401
    if WorkerSettings().serve:
        engine_process().stop()


@signals.worker_shutdown.connect
def _leave(**_: Any) -> None:  # noqa: ANN401
    _life().close()
