"""How is Celery set up? Messages wake; Postgres decides.

Acked early, results ignored, a message holds no work: losing or doubling one changes nothing.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery, signals
from celery.schedules import schedule

from service import logs
from service.clock import Clock, monotonic
from service.db.migrate import WrongTables, refuse_other_tables
from service.settings import Settings
from service.wake import CPU_QUEUE, STALE_TICKS

SWEEP_TICKS = 5
"""Bytes may go some ticks later than they could."""

ABORT_S = 900.0
"""So often the store is asked for writes that nobody will finish; a listing costs it something."""


def make_app(settings: Settings, *, include: tuple[str, ...]) -> Celery:
    """A Celery app on the settings' broker; `include` names the modules that hold its tasks."""
    now = steady(monotonic)
    stale_s = settings.tick_s * STALE_TICKS
    app = Celery("halfrate", broker=settings.redis_url.get_secret_value(), include=include)
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
        # Nothing is kept of when a task last ran: a file would hold what a stepped clock said.
        beat_scheduler="celery.beat:Scheduler",
        beat_schedule={
            name: {
                "task": f"halfrate.{name}",
                "schedule": schedule(timedelta(seconds=every_s), nowfun=now),
                "options": {"queue": CPU_QUEUE, "expires": max(every_s, stale_s)},
            }
            for name, every_s in (
                ("tick", settings.tick_s),
                ("sweep", settings.tick_s * SWEEP_TICKS),
                ("abort_abandoned", ABORT_S),
            )
        },
    )
    return app


def steady(clock: Clock) -> Callable[[], datetime]:
    """The time by a clock that nobody sets: set back an hour, the host's own would stop the beat
    for that hour."""
    begun, since = datetime.now(UTC), clock()
    return lambda: begun + timedelta(seconds=clock() - since)


@signals.worker_init.connect
def _check_tables(**_: Any) -> None:  # noqa: ANN401 - Celery's signals hand over what they like
    # Before any fork, and before an engine is loaded: those who connect to this signal later, such
    # as `worker.engine_app`, are called later.
    try:
        refuse_other_tables(Settings().database_url.get_secret_value())
    except WrongTables as error:
        # Not an Exception: Celery would log those, and start all the same.
        raise SystemExit(str(error)) from error


@signals.setup_logging.connect
def _log(**_: Any) -> None:  # noqa: ANN401 - as above
    logs.configure(Settings().log_level)
