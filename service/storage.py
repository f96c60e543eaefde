"""How are bytes put into and read from the S3 store, by the API and by the workers alike?"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from io import BytesIO
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

import boto3
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.handlers import add_expect_header
from urllib3.exceptions import HTTPError

from service.settings import MIB, Settings

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef, GetObjectOutputTypeDef

PART_BYTES = 8 * MIB
"""Size of the first thousand parts of a multipart upload: S3 takes 10,000 parts of ≥5 MiB."""

DELETE_KEYS = 1_000
"""Most keys of one DeleteObjects call."""

RESUMES = 5
"""How often in a row a read may break without having given a byte."""

MISSING = frozenset({"NoSuchKey", "NotFound", "404"})

_log = structlog.get_logger(__name__)


class StorageError(Exception):
    """The store did not do what it was asked; trying again later may help."""


class MissingObject(StorageError):
    """There is no object of that key."""


class ReplacedObject(StorageError):
    """The object became another one while it was being read."""


class Storage:
    """One bucket. Safe to use from many threads; nothing of botocore's comes out of it."""

    def __init__(
        self,
        *,
        endpoint_url: str | None,
        region: str,
        bucket: str,
        access_key_id: str | None,
        secret_access_key: str | None,
    ) -> None:
        self.bucket = bucket
        self._region = region
        self._on_aws = endpoint_url is None
        session = boto3.session.Session(
            aws_access_key_id=access_key_id,
            aws_secret_access_key=secret_access_key,
            region_name=region,
        )

        def client(*, connect_s: float, read_s: float, attempts: int) -> "S3Client":
            made = session.client(
                "s3",
                endpoint_url=endpoint_url,
                config=Config(
                    connect_timeout=connect_s,
                    read_timeout=read_s,
                    retries={"mode": "standard", "total_max_attempts": attempts},
                    max_pool_connections=64,
                    # Stores other than AWS are reached by a host name that has no room for a
                    # bucket, and not all of them know the newer checksum trailers.
                    s3={"addressing_style": "auto" if endpoint_url is None else "path"},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
            # Bodies are small and at hand, so asking first saves nothing; and where the connection
            # breaks within the store's "100 Continue", botocore reads on for ever.
            made.meta.events.unregister("before-call.s3", add_expect_header)
            return made

        self._client = client(connect_s=5, read_s=60, attempts=4)
        self._pinger = client(connect_s=2, read_s=2, attempts=1)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The bucket that the settings name."""
        key, secret = settings.s3_access_key_id, settings.s3_secret_access_key
        return cls(
            endpoint_url=settings.s3_endpoint_url,
            region=settings.s3_region,
            bucket=settings.s3_bucket,
            access_key_id=None if key is None else key.get_secret_value(),
            secret_access_key=None if secret is None else secret.get_secret_value(),
        )

    def close(self) -> None:
        """Give every connection back."""
        self._client.close()
        self._pinger.close()

    def ensure_bucket(self) -> None:
        """Make the bucket unless it is there; doing it twice, or at once, is fine."""
        try:
            with _translated(self.bucket):
                self._client.head_bucket(Bucket=self.bucket)
        except MissingObject:
            self._create_bucket()

    def _create_bucket(self) -> None:
        with _translated(self.bucket):
            try:
                if self._on_aws and self._region != "us-east-1":
                    self._client.create_bucket(
                        Bucket=self.bucket,
                        # The stubs spell every region out; a setting is any text.
                        CreateBucketConfiguration={"LocationConstraint": self._region},  # type: ignore[typeddict-item]
                    )
                else:
                    self._client.create_bucket(Bucket=self.bucket)
            except ClientError as error:
                # Somebody was quicker. Whether the bucket is ours shows in the head.
                if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise
                self._client.head_bucket(Bucket=self.bucket)

    def ping(self) -> None:
        """Raise StorageError unless the bucket answers within a few seconds."""
        with _translated(self.bucket):
            self._pinger.head_bucket(Bucket=self.bucket)

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object, replacing what stood there."""
        with _translated(key):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def size(self, key: str) -> int:
        """The object's size in bytes."""
        with _translated(key):
            return self._client.head_object(Bucket=self.bucket, Key=key)["ContentLength"]

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start`, or fewer where the object ends sooner."""
        return b"".join(self.stream(key, start, length, chunk=8 * MIB))

    def stream(
        self, key: str, start: int = 0, length: int | None = None, chunk: int = MIB
    ) -> Generator[bytes]:
        """The same bytes in pieces of at most `chunk`; a broken connection is taken up again.

        Whoever does not read to the end closes the generator, and with it the connection.
        """
        position, end = start, None if length is None else start + length
        etag, breaks = None, 0
        while end is None or position < end:
            before = position
            try:
                with _translated(key):
                    reply = self._open(key, position, end)
                    if reply is None:
                        return
                    with closing(reply["Body"]) as body:
                        _check_same(key, etag, reply["ETag"])
                        etag, end = reply["ETag"], position + reply["ContentLength"]
                        while piece := body.read(min(chunk, end - position) or chunk):
                            position += len(piece)
                            yield piece
            except (MissingObject, ReplacedObject):
                raise
            except StorageError as error:
                breaks = 1 if position > before else breaks + 1
                if etag is None or breaks > RESUMES:
                    raise
                _log.warning("read resumed", key=key, position=position, reason=str(error))

    def _open(self, key: str, start: int, end: int | None) -> "GetObjectOutputTypeDef | None":
        """The object from `start` on; None where it has no byte there."""
        if start == 0 and end is None:
            return self._client.get_object(Bucket=self.bucket, Key=key)
        wanted = f"bytes={start}-{'' if end is None else end - 1}"
        try:
            return self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)
        except ClientError as error:
            if _code(error) in ("InvalidRange", "416"):
                return None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects; those that are not there are fine."""
        remaining = iter(keys)
        while some := list(islice(remaining, DELETE_KEYS)):
            with _translated(some[0]):
                reply = self._client.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": key} for key in some], "Quiet": True},
                )
            failed = [e for e in reply.get("Errors", ()) if e.get("Code") not in MISSING]
            if failed:
                raise StorageError(f"{len(failed)} of {len(some)} objects were not removed")

    def list(self, prefix: str) -> Iterator[str]:
        """The keys that begin with `prefix`, a page at a time."""
        with _translated(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix):
                # Every list says this; a reply that was cut off before its body does not, and
                # would pass for an empty one.
                _ = page["IsTruncated"]
                for found in page.get("Contents", ()):
                    yield found["Key"]

    def abort_unfinished(self, before: datetime) -> int:
        """Drop the multipart uploads that were begun before then: how many there were."""
        number = 0
        for key, upload in self.unfinished(before):
            with suppress(MissingObject), _translated(key):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
                number += 1
        return number

    def unfinished(self, before: datetime) -> Iterator[tuple[str, str]]:
        """The multipart uploads that were begun before then: key and id."""
        with _translated(self.bucket):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.bucket):
                for found in page.get("Uploads", ()):
                    if found["Initiated"] < before:
                        yield found["Key"], found["UploadId"]

    def writer(self, key: str) -> "ObjectWriter":
        """An object written in pieces, there as a whole once the `with` block has ended well."""
        return ObjectWriter(self._client, self.bucket, key)


class ObjectWriter:
    """Bytes on their way into one object; holds at most two parts of them.

    Leaving its `with` block completes the object, leaving it by an exception leaves nothing behind.
    Used by one thread at a time.
    """

    def __init__(self, client: "S3Client", bucket: str, key: str) -> None:
        self.size = 0
        self._client, self._bucket, self._key = client, bucket, key
        # Hands its bytes out without copying them, which a bytearray could not: under the
        # interpreter's lock, a copy of a part is a millisecond of everybody's.
        self._buffer = BytesIO()
        self._upload: str | None = None
        self._parts: list[CompletedPartTypeDef] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def write(self, data: bytes | memoryview) -> None:
        """Take `data`; it is sent on whenever a part is full."""
        rest = memoryview(data)
        while rest:
            # Growing parts: an object may become as large as the store takes (5 TiB).
            part_bytes = PART_BYTES * (1 + len(self._parts) // 1_000)
            taken = rest[: part_bytes - self._buffer.tell()]
            self._buffer.write(taken)
            self.size += len(taken)
            rest = rest[len(taken) :]
            if self._buffer.tell() == part_bytes:
                self._send_part()

    def finish(self) -> None:
        """Make the object. Raises StorageError, and then leaves no part of it behind."""
        try:
            if self._upload is None:
                with _translated(self._key):
                    self._client.put_object(
                        Bucket=self._bucket, Key=self._key, Body=self._buffer.getvalue()
                    )
            else:
                if self._buffer.tell():
                    self._send_part()
                self._complete(self._upload)
        except BaseException:
            self.abort()
            raise
        self._buffer = BytesIO()

    def abort(self) -> None:
        """Drop what was written. Never raises: it is called where something failed already."""
        self._buffer = BytesIO()
        if self._upload is None:
            return
        upload, self._upload = self._upload, None
        try:
            with _translated(self._key):
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=self._key, UploadId=upload
                )
        except MissingObject:
            pass
        except StorageError as error:
            _log.warning("multipart upload not aborted", key=self._key, reason=str(error))

    def _send_part(self) -> None:
        with _translated(self._key):
            if self._upload is None:
                begun = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._key)
                self._upload = begun["UploadId"]
            number = len(self._parts) + 1
            sent = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self._upload,
                PartNumber=number,
                Body=self._buffer.getvalue(),
            )
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})
        self._buffer = BytesIO()

    def _complete(self, upload: str) -> None:
        with _translated(self._key):
            try:
                self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=upload,
                    MultipartUpload={"Parts": self._parts},
                )
            except ClientError as error:
                # A retry, inside the client, of a call that had worked: the upload is gone and
                # the object is there.
                if _code(error) != "NoSuchUpload":
                    raise
                head = self._client.head_object(Bucket=self._bucket, Key=self._key)
                if head["ContentLength"] != self.size:
                    raise


def _check_same(key: str, before: str | None, etag: str) -> None:
    if before is not None and etag != before:
        raise ReplacedObject(f"{key} was replaced while it was read")


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Whatever botocore raises becomes a StorageError that names the key."""
    try:
        yield
    except ClientError as error:
        code = _code(error)
        if code in MISSING or code == "NoSuchUpload":
            raise MissingObject(f"{key}: {code}") from error
        raise StorageError(f"{key}: {code or error}") from error
    except (BotoCoreError, HTTPError, OSError) as error:
        raise StorageError(f"{key}: {error}") from error
    except KeyError as error:
        # A connection that breaks among the headers of a reply looks like one without them.
        raise StorageError(f"{key}: the reply has no {error}") from error
