"""How does Alembic reach the database? By HALFRATE_DATABASE_URL, or the URL it is handed."""

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

# Alembic sees the tables of the modules that are imported: every one that declares any.
from service.db import models, upload_models, webhook_models  # noqa: F401 - as above
from service.db.base import Base
from service.settings import PartUrls


def _url() -> str:
    handed = context.config.attributes.get("url")
    if isinstance(handed, str):
        return handed
    configured = PartUrls().database_url
    if configured is None:
        raise SystemExit("HALFRATE_DATABASE_URL is not set.")
    return configured.get_secret_value()


def run() -> None:
    """Upgrade in one transaction, giving up rather than queueing behind a long lock."""
    # No pool: a migration that fails must not leave a connection that keeps the lock below.
    engine = create_engine(
        make_url(_url()).set(drivername="postgresql+psycopg"), poolclass=NullPool
    )
    with engine.connect() as connection:
        connection.execute(text("SET lock_timeout = '5s'"))
        # Two migrators at once (several replicas starting): the second waits, then finds nothing.
        connection.execute(text("SELECT pg_advisory_lock(7307421)"))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            compare_type=True,
            compare_server_default=True,
        )
        with context.begin_transaction():
            context.run_migrations()
        connection.commit()


if context.is_offline_mode():
    context.configure(dialect_name="postgresql", target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    run()
