"""Do the three embedded programs keep to their folder, to this machine, and to their keys?"""

import os
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import psutil
import psycopg
import pytest
import redis
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.stack.part import PartState
from service.stack.parts import (
    EmbeddedUrls,
    Secrets,
    addresses,
    embedded,
    prepare_embedded,
)
from service.stack.ports import LOOPBACK, Ports, is_free
from service.stack.postgres import NOBODY
from service.stack.process import empty_folder
from service.stack.roster import Roster
from service.stack.sweep import leftovers

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

# Longer than the 107 bytes that the path of a unix socket may have.
LONG = "a-folder-with-a-rather-long-name-" * 3
BUCKET = "halfrate"


@dataclass(frozen=True)
class Running:
    """Three programs that run, and where."""

    home: Path
    roster: Roster
    words: Secrets
    ports: Ports

    @property
    def settings(self) -> dict[str, str]:
        return addresses(self.roster, self.words)


def started(home: Path) -> Running:
    empty_folder(home / "tmp")
    running = Running(
        home, Roster(home), Secrets.kept_in(home / "secrets.json"), Ports(home / "ports.json")
    )
    try:
        for prepare in prepare_embedded(home, running.ports, running.words, durable=False).values():
            running.roster.begin(prepare)
        running.roster.await_ready()
    except BaseException:
        running.roster.stop()
        raise
    return running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("parts") / LONG / LONG
    home.mkdir(parents=True)
    made = started(home.resolve())
    yield made
    made.roster.stop()


def until(what: Callable[[], bool], *, tick: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        tick()
        time.sleep(0.05)


def bucket_client(settings: dict[str, str], config: Config | None = None) -> "S3Client":
    return boto3.client(
        "s3",
        endpoint_url=settings["HALFRATE_S3_ENDPOINT_URL"],
        aws_access_key_id=settings["HALFRATE_S3_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["HALFRATE_S3_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
        config=config,
    )


def test_long_paths_are_no_obstacle(running: Running) -> None:
    assert len(str(running.home)) > 200
    assert {member.state for member in running.roster.members} == {PartState.RUNNING}


def test_nothing_listens_beyond_this_machine(running: Running) -> None:
    heard = {
        connection.laddr
        for process in leftovers(running.home)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }

    assert {address.ip for address in heard} == {LOOPBACK}
    known = {port for member in running.roster.members for port in member.part.ports}
    assert {address.port for address in heard} == known


def test_no_password_stands_in_an_argument_or_a_log(running: Running) -> None:
    words = [getattr(running.words, name) for name in Secrets.__dataclass_fields__]
    arguments = [" ".join(process.cmdline()) for process in leftovers(running.home)]
    logs = [log.read_text() for log in (running.home / "logs").iterdir()]

    assert len(arguments) >= 3
    assert not [word for word in words for text in arguments + logs if word in text]


def test_files_with_passwords_are_their_owners_alone(running: Running) -> None:
    words = [getattr(running.words, name).encode() for name in Secrets.__dataclass_fields__]
    holding = [
        file
        for file in running.home.rglob("*")
        if file.is_file() and any(word in file.read_bytes() for word in words)
    ]

    assert {file.name for file in holding} >= {"secrets.json", "valkey.conf", "s3.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in holding} == {0o600}


def test_strangers_are_not_let_in(running: Running) -> None:
    settings, valkey_port = running.settings, running.roster.part("valkey").ports[0]
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(settings["HALFRATE_DATABASE_URL"].replace(running.words.postgres, "wrong"))
    with (
        closing(redis.Redis(port=valkey_port, retry=Retry(NoBackoff(), 0))) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()
    with (
        closing(bucket_client(settings, Config(signature_version=UNSIGNED))) as client,
        pytest.raises(ClientError) as caught,
    ):
        client.put_object(Bucket=BUCKET, Key="stranger", Body=b"x")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_the_servers_behind_s3_let_no_stranger_in_either(running: Running, method: str) -> None:
    with closing(bucket_client(running.settings)) as client:
        client.put_object(Bucket=BUCKET, Key="kept", Body=b"secret")
    port = running.roster.part("seaweedfs").ports[2]
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/buckets/{BUCKET}/kept", method=method, data=b"x"
    )

    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)  # noqa: S310 - as above

    caught.value.close()
    assert caught.value.code == 401


def test_postgres_speaks_utf8_and_checks_its_pages(running: Running) -> None:
    with psycopg.connect(running.settings["HALFRATE_DATABASE_URL"]) as connection:
        row = connection.execute(
            "SELECT current_setting('server_encoding'), current_setting('data_checksums')"
        ).fetchone()

    assert row == ("UTF8", "on")


def test_a_killed_postgres_comes_back_with_its_data(running: Running) -> None:
    url = running.settings["HALFRATE_DATABASE_URL"]
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (line integer)")
    member = next(m for m in running.roster.members if m.part.name == "postgres")
    first = member.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    until(lambda: member.pid not in (None, first), tick=running.roster.tick)
    until(lambda: member.state is PartState.RUNNING, tick=running.roster.tick)

    assert member.restarts == 1
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_everything_is_found_again_on_other_ports_and_nothing_is_left(tmp_path: Path) -> None:
    """Stopped and started again: the ports were taken, and a stale pid file names a stranger."""
    first = started(tmp_path)
    with psycopg.connect(first.settings["HALFRATE_DATABASE_URL"]) as connection:
        connection.execute("CREATE TABLE kept (line integer)")
    with closing(bucket_client(first.settings)) as client:
        client.put_object(Bucket=BUCKET, Key="kept", Body=b"bytes")
    first.roster.stop()
    assert_nothing_is_left(first)
    (tmp_path / "ports.json").unlink()
    with stranger() as pid:
        pid_file = tmp_path / "postgres" / "data" / "postmaster.pid"
        pid_file.write_text(f"{pid}\n{pid_file.parent}\n1700000000\n5432\n\n127.0.0.1\n\nready\n")

        second = started(tmp_path)

        assert psutil.pid_exists(pid)
    with psycopg.connect(second.settings["HALFRATE_DATABASE_URL"]) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    with (
        closing(bucket_client(second.settings)) as client,
        closing(client.get_object(Bucket=BUCKET, Key="kept")["Body"]) as body,
    ):
        assert body.read() == b"bytes"
    second.roster.stop()
    assert_nothing_is_left(second)


def test_the_block_form_starts_and_stops_all_three(tmp_path: Path) -> None:
    with embedded(tmp_path) as urls:
        assert isinstance(urls, EmbeddedUrls)
        with closing(redis.Redis.from_url(urls.redis_url)) as client:
            assert client.ping()
        assert leftovers(tmp_path)

    assert leftovers(tmp_path) == []


def assert_nothing_is_left(running: Running) -> None:
    assert leftovers(running.home) == []
    for member in running.roster.members:
        assert all(is_free(port) for port in member.part.ports)
        assert not [path for path in member.part.outside if path.exists()]


class stranger:  # noqa: N801 - reads as the block it opens
    """A process that has nothing to do with us, of the user that Postgres runs as."""

    def __enter__(self) -> int:
        user = NOBODY if os.geteuid() == 0 else None
        self._process = subprocess.Popen(["/bin/sleep", "600"], user=user)
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
