"""How is the embedded Valkey prepared and started?"""

from pathlib import Path
from signal import Signals

import redis

from service.stack.part import Part, StopStep
from service.stack.ports import LOOPBACK
from service.stack.private import write_private
from service.stack.programs import valkey_program

NAME = "valkey"


def redis_url(port: int, password: str) -> str:
    """Where clients find it."""
    return f"redis://:{password}@{LOOPBACK}:{port}/0"


def prepare_valkey(folder: Path, *, port: int, password: str) -> Part:
    """Write its configuration and say how it is started.

    It keeps nothing: messages only wake workers, so losing them costs a tick.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # In a file of mode 600, because any user may read the arguments of a process; relative to
    # the working directory, so that no path needs quoting. Its own process title would overwrite
    # the environment that a sweep knows it by.
    write_private(
        folder / "valkey.conf",
        f"bind {LOOPBACK}\n"
        f"port {port}\n"
        f"requirepass {password}\n"
        "dir .\n"
        'save ""\n'
        "appendonly no\n"
        "daemonize no\n"
        "set-proc-title no\n"
        'logfile ""\n',
    )
    url = redis_url(port, password)
    return Part(
        name=NAME,
        argv=(str(valkey_program()), "valkey.conf"),
        folder=folder,
        environment={},
        ports=(port,),
        url=f"redis://{LOOPBACK}:{port}/0",
        ready=lambda _: _answers(url),
        stop=(StopStep(Signals.SIGTERM, 5.0),),
        start_s=20.0,
    )


def _answers(url: str) -> bool:
    client = redis.Redis.from_url(
        url, socket_connect_timeout=1, socket_timeout=1, retry_on_timeout=False
    )
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
