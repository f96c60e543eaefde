"""Does a broker that is away cost nothing but seconds?"""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from service.wake import Waker, engine_queue


@pytest.fixture
def away() -> Iterator[Waker]:
    """A waker whose broker refuses: the port is bound and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with closing(Waker(f"redis://127.0.0.1:{taken.getsockname()[1]}/0")) as waker:
            yield waker


def test_waking_into_the_void_raises_nothing(away: Waker) -> None:
    away.validate()
    away.plan()
    away.drain("m")
    away.assemble()
    away.clean()
    away.deliver()


def test_a_ping_says_that_the_broker_is_away(away: Waker) -> None:
    with pytest.raises((OperationalError, RedisError)):
        away.ping()


def test_every_model_has_a_queue_of_its_own() -> None:
    assert engine_queue("a") != engine_queue("b")
