"""Which programs stand under the service, and how are they started together?"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from service.stack.ports import Ports
from service.stack.postgres import database_url, prepare_postgres
from service.stack.private import write_private
from service.stack.process import empty_folder
from service.stack.roster import Prepare, Roster
from service.stack.seaweedfs import PORT_NAMES, prepare_seaweedfs, s3_endpoint_url
from service.stack.sweep import sweep
from service.stack.valkey import prepare_valkey, redis_url


@dataclass(frozen=True, slots=True)
class Secrets:
    """The generated passwords of one home; they stand in no argument list and no log."""

    postgres: str
    valkey: str
    s3_access_key: str
    s3_secret_key: str
    s3_signing: str

    @classmethod
    def kept_in(cls, file: Path) -> "Secrets":
        """Those of the file; where there is none, new ones, kept there.

        Letters and digits, so that they need no quoting in a URL or a configuration.
        """
        if not file.exists():
            words = cls(*(secrets.token_hex(24) for _ in fields(cls)))
            write_private(file, json.dumps(asdict(words), indent=1) + "\n")
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedUrls:
    """Where a running Postgres, Valkey and SeaweedFS are found, and with which keys."""

    database_url: str
    redis_url: str
    s3_endpoint_url: str
    s3_access_key_id: str
    s3_secret_access_key: str


def prepare_embedded(
    folder: Path, ports: Ports, words: Secrets, *, durable: bool = True
) -> dict[str, Prepare]:
    """How each of the three programs is prepared below `folder`, by name.

    The slowest starts first; the cluster is made while it comes up.
    """
    return {
        "seaweedfs": lambda: prepare_seaweedfs(
            folder / "seaweedfs",
            ports={name: ports.take(f"seaweedfs.{name}") for name in PORT_NAMES},
            access_key=words.s3_access_key,
            secret_key=words.s3_secret_key,
            signing=words.s3_signing,
        ),
        "valkey": lambda: prepare_valkey(
            folder / "valkey", port=ports.take("valkey"), password=words.valkey
        ),
        "postgres": lambda: prepare_postgres(
            folder / "postgres",
            port=ports.take("postgres"),
            password=words.postgres,
            durable=durable,
        ),
    }


@contextmanager
def embedded(folder: Path) -> Iterator[EmbeddedUrls]:
    """Postgres, Valkey and SeaweedFS below `folder`, stopped at the end; nothing in it is kept
    safe from a power cut.

    Raises:
        StackError: one of them did not start.
    """
    home = folder.resolve()
    home.mkdir(parents=True, exist_ok=True)
    sweep(home)
    empty_folder(home / "tmp")
    words = Secrets.kept_in(home / "secrets.json")
    roster = Roster(home)
    prepared = prepare_embedded(home, Ports(home / "ports.json"), words, durable=False)
    try:
        for prepare in prepared.values():
            roster.begin(prepare)
        roster.await_ready()
        yield urls(roster, words)
    finally:
        roster.stop()


def urls(roster: Roster, words: Secrets) -> EmbeddedUrls:
    """The addresses of the three programs, all running."""
    found = addresses(roster, words)
    return EmbeddedUrls(
        database_url=found["HALFRATE_DATABASE_URL"],
        redis_url=found["HALFRATE_REDIS_URL"],
        s3_endpoint_url=found["HALFRATE_S3_ENDPOINT_URL"],
        s3_access_key_id=found["HALFRATE_S3_ACCESS_KEY_ID"],
        s3_secret_access_key=found["HALFRATE_S3_SECRET_ACCESS_KEY"],
    )


def addresses(roster: Roster, words: Secrets) -> dict[str, str]:
    """The settings that name those of the three programs which the roster holds."""
    port = {member.part.name: member.part.port or 0 for member in roster.members}
    settings = {}
    if "postgres" in port:
        settings["HALFRATE_DATABASE_URL"] = database_url(port["postgres"], words.postgres)
    if "valkey" in port:
        settings["HALFRATE_REDIS_URL"] = redis_url(port["valkey"], words.valkey)
    if "seaweedfs" in port:
        settings["HALFRATE_S3_ENDPOINT_URL"] = s3_endpoint_url(port["seaweedfs"])
        settings["HALFRATE_S3_ACCESS_KEY_ID"] = words.s3_access_key
        settings["HALFRATE_S3_SECRET_ACCESS_KEY"] = words.s3_secret_key
    return settings
