"""How is a transaction opened, and which clock stamps what it writes?"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from select import POLLIN, poll
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from service.clock import Clock, monotonic

PATIENCE_S = 5.0
"""The pool waits so long for a free connection and then says so: a full pool answers 503 and does
not hang."""

RESTED_S = 1.0
"""A connection used more lately is taken to stand, unless its server has sent something since."""

_RESTS_SINCE = "rests_since"


class Database:
    """A pool of connections. `transaction()` is the only thing that commits several statements."""

    def __init__(
        self,
        url: str,
        *,
        pool: int,
        application: str,
        patience_s: float = PATIENCE_S,
        clock: Clock = monotonic,
    ) -> None:
        self.engine = create_engine(
            make_url(url).set(drivername="postgresql+psycopg"),
            pool_size=pool,
            max_overflow=0,
            pool_timeout=patience_s,
            # Values that a client sent (metadata, names) have no place in an exception's text.
            hide_parameters=True,
            connect_args={
                "application_name": application,
                "connect_timeout": 5,
                # A server that went without a word (failover, partition) is noticed in seconds.
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 20_000,
            },
        )
        _ping_doubtful(self.engine, clock)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)
        # The same pool; its BEGIN and COMMIT would be two of a small read's four round trips.
        self._reads = sessionmaker(
            self.engine.execution_options(isolation_level="AUTOCOMMIT"),
            expire_on_commit=False,
            autoflush=False,
        )

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One request or one stage step: commits at the end, rolls back on any exception."""
        with self._sessions() as session, session.begin():
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """For the small reads that clients repeat: each statement is a transaction by itself, so
        two of them may see different states."""
        with self._reads() as session:
            yield session

    def close(self) -> None:
        """Give every connection back."""
        self.engine.dispose()


def _ping_doubtful(engine: Engine, clock: Clock) -> None:
    """Have a connection of which it is not certain asked whether it still stands, before anyone
    gets it.

    The pool's own `pool_pre_ping` asks each time: of a small read's three round trips, one. But a
    server that stopped or was killed has told so: without being asked, it only ever sends its last
    words, and where it could not even do that, the end of the stream can be read.
    """

    def rests(_connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        record.info[_RESTS_SINCE] = clock()

    def ping(connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: object) -> None:
        since = record.info.get(_RESTS_SINCE)
        if since is None or (clock() - since < RESTED_S and not _has_word(connection)):
            return
        try:
            engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            # The pool makes it anew, and every other one of the same age.
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", rests)
    event.listen(engine, "checkout", ping)


def _has_word(connection: DBAPIConnection) -> bool:
    """Whether there is anything to be read of a connection that has nothing to answer."""
    waiting = poll()  # not select(), which takes no descriptor above 1,023
    waiting.register(_psycopg(connection).fileno(), POLLIN)
    return bool(waiting.poll(0))


def now(session: Session) -> datetime:
    """Postgres's clock: the one by which leases, windows and stamps are written everywhere."""
    stamp: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return stamp


def wait_briefly(session: Session) -> None:
    """Until commit, wait a second at most for a row lock: for whoever looks again soon."""
    session.execute(text("SET LOCAL lock_timeout = '1s'"))


def driver(session: Session) -> psycopg.Connection[Any]:
    """The psycopg connection under the session, for COPY."""
    return _psycopg(session.connection().connection.driver_connection)


def _psycopg(connection: object) -> psycopg.Connection[Any]:
    if not isinstance(connection, psycopg.Connection):
        raise TypeError("the database driver is not psycopg")
    return connection
