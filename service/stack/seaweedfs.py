"""How is the embedded SeaweedFS prepared and started?"""

import json
from collections.abc import Mapping
from pathlib import Path
from signal import Signals

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from service.stack.part import BULK_NICE, Part, StopStep
from service.stack.ports import LOOPBACK, is_free
from service.stack.private import write_private
from service.stack.programs import weed_program

NAME = "seaweedfs"
BUCKET = "halfrate"
# One process is four servers, each with a port for HTTP and one for gRPC.
SERVERS = ("s3", "filer", "volume", "master")
PORT_NAMES = tuple(f"{server}{kind}" for server in SERVERS for kind in ("", ".grpc"))


def s3_endpoint_url(port: int) -> str:
    """Where S3 clients find it."""
    return f"http://{LOOPBACK}:{port}"


def prepare_seaweedfs(
    folder: Path, *, ports: Mapping[str, int], access_key: str, secret_key: str, signing: str
) -> Part:
    """Write its configuration and say how it is started.

    Args:
        folder: holds its data and configuration.
        ports: one for each of PORT_NAMES.
        access_key: S3 key id, the only one that is let in.
        secret_key: its secret.
        signing: key of the tokens between its own servers; without them, everybody on this
            machine could read and write by the filer's and the volume server's ports.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    _write_configuration(folder, access_key, secret_key, signing)
    url = s3_endpoint_url(ports["s3"])
    return Part(
        name=NAME,
        argv=(str(weed_program()), *_arguments(ports)),
        folder=folder,
        # It also looks for configuration in the home of its user, where another one may lie.
        environment={"HOME": str(folder)},
        ports=tuple(ports[name] for name in PORT_NAMES),
        url=url,
        ready=lambda _: _takes_objects(ports["s3"], access_key, secret_key),
        # On SIGTERM it waits 15 s for streams between its own servers. Its clients are stopped by
        # then and written bytes are with the kernel, so killing it sooner loses nothing.
        stop=(StopStep(Signals.SIGTERM, 1.5),),
        outside=tuple(_local_sockets(ports)),
        nice=BULK_NICE,
    )


def _write_configuration(folder: Path, access_key: str, secret_key: str, signing: str) -> None:
    identity = {
        "name": "halfrate",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    write_private(folder / "s3.json", json.dumps({"identities": [identity]}))
    sections = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
    write_private(
        folder / "security.toml",
        "".join(
            f'[{section}]\nkey = "{signing}"\nexpires_after_seconds = 60\n' for section in sections
        ),
    )
    # Seven at a time is its default, meant for racks.
    write_private(folder / "master.toml", "[master.volume_growth]\ncopy_1 = 1\n")


def _arguments(ports: Mapping[str, int]) -> list[str]:
    listening = [
        f"-{server}.port{kind}={ports[server + kind]}"
        for server in SERVERS
        for kind in ("", ".grpc")
    ]
    return [
        "-logtostderr=true",  # and not into files of TMPDIR too
        "server",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        *listening,
        "-dir=data",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        # Volumes are files that grow as they fill, at most a thousand of one GiB each.
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=1000",
        "-volume.preStopSeconds=0",
        "-filer",
        "-filer.localSocket=filer.sock",
        "-filer.exposeDirectoryData=false",
        "-s3",
        "-s3.config=s3.json",
        "-s3.localSocket=s3.sock",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _local_sockets(ports: Mapping[str, int]) -> list[Path]:
    """Unix sockets between its servers. Their place is fixed in the program, and killing it leaves
    them there."""
    folder = Path("/tmp")  # noqa: S108 - the program's choice; each name holds a port of ours
    return [
        folder / f"seaweedfs-{server}-grpc-{ports[f'{server}.grpc']}.sock" for server in SERVERS
    ]


def _takes_objects(port: int, access_key: str, secret_key: str) -> bool:
    if is_free(port):
        return False  # nobody listens yet; asking by boto3 costs more
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint_url(port),
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=3),
    )
    try:
        client.create_bucket(Bucket=BUCKET)
    except (client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
        pass
    except (BotoCoreError, ClientError):
        return False
    try:
        # Buckets can be made before a volume can be written.
        client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
        client.delete_object(Bucket=BUCKET, Key=".ready")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True
