"""How is a transaction opened, and which clock stamps what it writes?"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker


class Database:
    """A pool of connections. `transaction()` is the only thing that commits."""

    def __init__(self, url: str, *, pool: int, application: str) -> None:
        # The pool waits at most 5 s for a free connection and then says so: a full pool must
        # answer 503, not hang.
        self.engine = create_engine(
            make_url(url).set(drivername="postgresql+psycopg"),
            pool_size=pool,
            max_overflow=0,
            pool_timeout=5,
            pool_pre_ping=True,
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
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One request or one stage step: commits at the end, rolls back on any exception."""
        with self._sessions() as session, session.begin():
            yield session

    def close(self) -> None:
        """Give every connection back."""
        self.engine.dispose()


def now(session: Session) -> datetime:
    """Postgres's clock: the one by which leases, windows and stamps are written everywhere."""
    stamp: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return stamp


def wait_briefly(session: Session) -> None:
    """Until commit, wait a second at most for a row lock: for whoever looks again soon."""
    session.execute(text("SET LOCAL lock_timeout = '1s'"))


def driver(session: Session) -> psycopg.Connection[Any]:
    """The psycopg connection under the session, for COPY."""
    connection = session.connection().connection.driver_connection
    if not isinstance(connection, psycopg.Connection):
        raise TypeError("the database driver is not psycopg")
    return connection
