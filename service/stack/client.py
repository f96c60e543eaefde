"""How does an OpenAI client on this machine get in? By `client.env`, made and kept here."""

from service.db.keys import create_key, create_project, find, project_named
from service.db.models import Right
from service.db.session import Database
from service.stack.home import Home
from service.stack.private import write_private

PROJECT = "default"
KEY_NAME = "halfrate up"
KEY_VARIABLE = "OPENAI_API_KEY"


def client_key(home: Home, database: Database) -> str:
    """The key in `client.env` where it is still good, else a new one of the project `default`."""
    kept = _kept_key(home)
    with database.transaction() as session:
        project = project_named(session, PROJECT) or create_project(session, PROJECT)
        known = find(session, kept) if kept else None
        if known is not None and known.project_id == project.id:
            return kept
        _, plaintext = create_key(session, project.id, KEY_NAME, Right.ADMIN)
        return plaintext


def write_client_env(home: Home, url: str, key: str) -> None:
    """Write what a shell sources: base URL and key."""
    write_private(home.client_env, f"OPENAI_BASE_URL={url}/v1\n{KEY_VARIABLE}={key}\n")


def _kept_key(home: Home) -> str:
    try:
        lines = home.client_env.read_text().splitlines()
    except FileNotFoundError:
        return ""
    pairs = dict(line.partition("=")[::2] for line in lines)
    return pairs.get(KEY_VARIABLE, "")
