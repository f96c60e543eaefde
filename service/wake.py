"""How is a worker told that there is work? By a message that carries none.

Postgres decides who does what; the message only says "look". So a lost message is replaced by the
beat's next tick, a doubled one is harmless, and a broker that is down costs seconds, never work.
"""

import structlog
from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError

CPU_QUEUE = "cpu"
TRANSPORT_OPTIONS = {
    "socket_connect_timeout": 2,
    "socket_timeout": 2,
    "retry_on_timeout": False,
    "max_retries": 0,
}

MOST_WAITING = 16
"""So many wakes in a queue that nobody reads are enough: one more would say nothing new."""

STALE_TICKS = 30
"""A message older than so many is worth nothing. Not fewer: its age is told by the clocks of two
hosts, and a worker whose clock is a minute ahead must still hear the ticks."""

log = structlog.get_logger()


def engine_queue(model: str) -> str:
    """The Celery queue of a model's engine workers."""
    return f"engine.{model}"


class Waker:
    """Sends wake messages. Nothing here raises when the broker is away, except `ping`."""

    def __init__(self, redis_url: str, *, expires_s: float = 60) -> None:
        self._app = Celery("halfrate.wake", broker=redis_url, set_as_current=False)
        self._app.conf.update(
            task_ignore_result=True,
            broker_transport_options=TRANSPORT_OPTIONS,
            broker_connection_timeout=2,
        )
        self._redis = Redis.from_url(redis_url, socket_timeout=2, socket_connect_timeout=2)
        self._expires_s = expires_s

    def validate(self) -> None:
        """A batch is to be validated."""
        self._send("validate", CPU_QUEUE)

    def plan(self) -> None:
        """A validated batch is to be cut into shards."""
        self._send("plan", CPU_QUEUE)

    def assemble(self) -> None:
        """A batch's lines are all decided."""
        self._send("assemble", CPU_QUEUE)

    def clean(self) -> None:
        """An ended batch has parts to remove."""
        self._send("clean", CPU_QUEUE)

    def remove(self) -> None:
        """A deleted batch has rows to remove."""
        self._send("remove", CPU_QUEUE)

    def deliver(self) -> None:
        """A webhook endpoint is to be told something."""
        self._send("deliver", CPU_QUEUE)

    def drain(self, model: str) -> None:
        """There are shards of that model."""
        self._send("drain", engine_queue(model), model)

    def ping(self) -> None:
        """Raises kombu's OperationalError or redis's RedisError when the broker does not answer."""
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=2)

    def close(self) -> None:
        """Give the broker connections back."""
        self._app.close()
        self._redis.close()

    def _send(self, task: str, queue: str, *args: str) -> None:
        try:
            if self._redis.llen(queue) >= MOST_WAITING:
                return
            self._app.send_task(
                f"halfrate.{task}", args=args, queue=queue, expires=self._expires_s, retry=False
            )
        except (OperationalError, RedisError, OSError) as error:
            log.warning("wake not sent; the tick will", task=task, queue=queue, error=str(error))
