"""How is a database brought to the newest tables, from a checkout or an installed wheel?"""

import importlib.util

from alembic import command
from alembic.config import Config


def upgrade(url: str) -> None:
    """Run every migration that this database lacks; none is fine.

    Raises:
        RuntimeError: the migrations are not installed.
        sqlalchemy.exc.SQLAlchemyError: the database is away, or refuses.
    """
    # Found without importing: Alembic runs the environment itself.
    spec = importlib.util.find_spec("migrations")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("The package `migrations` is not installed beside `service`.")
    config = Config()
    # Alembic interpolates percent signs, which a path or a password may hold.
    config.set_main_option("script_location", _literal(spec.submodule_search_locations[0]))
    config.attributes["url"] = url
    command.upgrade(config, "head")


def _literal(value: str) -> str:
    return value.replace("%", "%%")
