"""Do the migrations make exactly the tables that the models describe?"""

import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config

from service.db.migrate import upgrade
from service.stack.parts import embedded

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Migrate a new database, then ask Alembic for differences; any is an error."""
    with tempfile.TemporaryDirectory() as folder, embedded(Path(folder)) as urls:
        upgrade(urls.database_url)
        config = Config(toml_file=ROOT / "pyproject.toml")
        config.attributes["url"] = urls.database_url
        command.check(config)


if __name__ == "__main__":
    main()
