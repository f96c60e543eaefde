"""May objects that rows name be removed from the store now? Not while a backup is made: it has the
state of one moment, and copies what that names some time after.

Whoever removes such objects does it inside `allowed`; the backup is inside `held_off`. Both fall
with their connection, however its process ends. Objects that no row names may go at any time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, func, select, text

LOCK = 7307423
PATIENCE_S = 60
"""Longest that a backup waits for removals under way; each is a matter of seconds."""


@contextmanager
def allowed(engine: Engine) -> Iterator[bool]:
    """Whether objects may be removed in the block. If not, they are left for a later time."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # Not where a backup only waits for the lock, either: it need not wait for long.
        got = connection.execute(select(func.pg_try_advisory_lock_shared(LOCK))).scalar_one()
        try:
            yield got
        finally:
            if got:
                connection.execute(select(func.pg_advisory_unlock_shared(LOCK)))


@contextmanager
def held_off(engine: Engine) -> Iterator[None]:
    """Nothing that a row names is removed in the block.

    Raises:
        sqlalchemy.exc.OperationalError: what is being removed was not done within PATIENCE_S.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"SET lock_timeout = '{PATIENCE_S}s'"))
        connection.execute(select(func.pg_advisory_lock(LOCK)))
        try:
            yield
        finally:
            connection.execute(select(func.pg_advisory_unlock(LOCK)))
            connection.execute(text("RESET lock_timeout"))
