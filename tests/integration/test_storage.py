"""Does the store keep what it is given, and leave nothing of what failed?"""

import hashlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
import pytest

from service.settings import MIB, Settings
from service.storage import (
    PART_BYTES,
    MissingObject,
    ReplacedObject,
    Storage,
    StorageError,
)
from tests.threads import running


@pytest.fixture
def key() -> str:
    return f"test/{uuid4().hex}"


@pytest.fixture
def s3(settings: Settings) -> Iterator[Any]:
    """A client of our own, to see what is really there."""
    client = _plain_client(settings)
    yield client
    client.close()


def test_an_object_reads_back_as_it_was_put(storage: Storage, key: str) -> None:
    storage.put(key, b"hello world")
    assert storage.read(key) == b"hello world"
    assert storage.size(key) == 11


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 5, b"hello"),
        (6, None, b"world"),
        (6, 100, b"world"),
        (3, 0, b""),
        (11, 1, b""),
        (50, None, b""),
    ],
)
def test_a_range_is_cut_at_the_end_of_the_object(
    storage: Storage, key: str, start: int, length: int | None, expected: bytes
) -> None:
    storage.put(key, b"hello world")
    assert storage.read(key, start, length) == expected


def test_an_empty_object_is_an_object(storage: Storage, key: str) -> None:
    storage.put(key, b"")
    assert storage.read(key) == b""
    assert storage.read(key, 0, 10) == b""
    assert storage.size(key) == 0


def test_a_missing_object_says_so(storage: Storage, key: str) -> None:
    with pytest.raises(MissingObject):
        storage.read(key)
    with pytest.raises(MissingObject):
        storage.read(key, 5, 5)
    with pytest.raises(MissingObject):
        storage.size(key)


def test_deleting_takes_keys_that_are_not_there(storage: Storage, key: str) -> None:
    storage.put(key, b"x")
    storage.delete([key, key + "-never"])
    storage.delete([key])
    storage.delete([])
    with pytest.raises(MissingObject):
        storage.read(key)


def test_more_keys_than_one_call_takes_are_deleted(storage: Storage, key: str) -> None:
    storage.put(f"{key}-1500", b"last")
    storage.delete(f"{key}-{number}" for number in range(1501))
    with pytest.raises(MissingObject):
        storage.size(f"{key}-1500")


def test_a_small_written_object_is_one_put(storage: Storage, key: str, s3: Any) -> None:
    with storage.writer(key) as writer:
        writer.write(b"a")
        writer.write(b"bc")
    assert writer.size == 3
    assert storage.read(key) == b"abc"
    # A multipart object's etag has a dash and the number of its parts.
    assert "-" not in s3.head_object(Bucket=storage.bucket, Key=key)["ETag"]


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 12_345])
def test_a_large_written_object_reads_back(storage: Storage, key: str, size: int) -> None:
    data = hashlib.shake_128(str(size).encode()).digest(MIB + 7)
    written = 0
    with storage.writer(key) as writer:
        while written < size:
            piece = data[: size - written]
            writer.write(piece)
            written += len(piece)
    assert storage.size(key) == writer.size == size
    whole = (data * (size // len(data) + 1))[:size]
    assert hashlib.sha256(storage.read(key)).digest() == hashlib.sha256(whole).digest()
    assert storage.read(key, PART_BYTES - 10, 20) == whole[PART_BYTES - 10 : PART_BYTES + 10]


def test_one_write_may_be_larger_than_several_parts(storage: Storage, key: str) -> None:
    data = bytes(range(256)) * (2 * PART_BYTES // 256 + 9)
    with storage.writer(key) as writer:
        writer.write(data)
    assert storage.read(key) == data


def test_a_write_left_by_an_exception_leaves_nothing(storage: Storage, key: str, s3: Any) -> None:
    def fail_midway() -> None:
        with storage.writer(key) as writer:
            writer.write(b"x" * (PART_BYTES + 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_midway()
    with pytest.raises(MissingObject):
        storage.size(key)
    assert _uploads_of(s3, storage.bucket, key) == []


def test_a_stream_comes_in_pieces_no_larger_than_asked(storage: Storage, key: str) -> None:
    data = bytes(range(256)) * 1000
    storage.put(key, data)
    pieces = list(storage.stream(key, 10, 100_000, chunk=1_000))
    assert max(map(len, pieces)) <= 1_000
    assert b"".join(pieces) == data[10:100_010]


def test_a_broken_connection_is_taken_up_where_it_broke(
    storage: Storage, settings: Settings, key: str
) -> None:
    data = hashlib.shake_128(b"resume").digest(3 * MIB)
    storage.put(key, data)
    with _cutting_proxy(settings, cut_after=MIB, cuts=2) as (url, cut):
        broken = _storage_at(settings, url)
        assert b"".join(broken.stream(key, 5, chunk=64 * 1024)) == data[5:]
        assert cut.is_set()
        broken.close()


def test_an_object_replaced_under_a_broken_read_is_not_mixed(
    storage: Storage, settings: Settings, key: str
) -> None:
    storage.put(key, b"a" * (3 * MIB))
    with _cutting_proxy(settings, cut_after=MIB, cuts=1) as (url, _cut):
        broken = _storage_at(settings, url)
        pieces = broken.stream(key, chunk=64 * 1024)
        next(pieces)
        storage.put(key, b"b" * (3 * MIB))
        with pytest.raises(ReplacedObject):
            list(pieces)
        broken.close()


def test_a_store_that_is_away_is_a_storage_error(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        away = _storage_at(settings, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StorageError):
            away.ping()
        away.close()


def test_wrong_keys_are_a_storage_error(settings: Settings, storage: Storage, key: str) -> None:
    stranger = Storage(
        endpoint_url=settings.s3_endpoint_url,
        region=settings.s3_region,
        bucket=storage.bucket,
        access_key_id="nobody",
        secret_access_key="guessed",
    )
    with pytest.raises(StorageError) as caught:
        stranger.put(key, b"x")
    assert not isinstance(caught.value, MissingObject)
    stranger.close()


def test_a_bucket_is_made_once(settings: Settings) -> None:
    fresh = settings.model_copy(update={"s3_bucket": f"made-{uuid4().hex}"})
    storage = Storage.from_settings(fresh)
    with pytest.raises(StorageError):
        storage.ping()
    storage.ensure_bucket()
    storage.ensure_bucket()
    storage.ping()
    client = _plain_client(settings)
    client.delete_bucket(Bucket=fresh.s3_bucket)
    client.close()
    storage.close()


def _plain_client(settings: Settings) -> Any:
    key, secret = settings.s3_access_key_id, settings.s3_secret_access_key
    assert key is not None
    assert secret is not None
    return boto3.client(
        "s3",
        endpoint_url=settings.s3_endpoint_url,
        region_name=settings.s3_region,
        aws_access_key_id=key.get_secret_value(),
        aws_secret_access_key=secret.get_secret_value(),
    )


def _uploads_of(s3: Any, bucket: str, key: str) -> list[str]:
    listed = s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return [upload["Key"] for upload in listed if upload["Key"] == key]


def _storage_at(settings: Settings, url: str) -> Storage:
    return Storage.from_settings(settings.model_copy(update={"s3_endpoint_url": url}))


@contextmanager
def _cutting_proxy(
    settings: Settings, *, cut_after: int, cuts: int
) -> Iterator[tuple[str, threading.Event]]:
    """The store, through a wire that breaks the first `cuts` replies after `cut_after` bytes."""
    target = urlsplit(settings.s3_endpoint_url or "")
    listener = socket.create_server(("127.0.0.1", 0))
    left, lock, has_cut = [cuts], threading.Lock(), threading.Event()
    threads: list[threading.Thread] = []

    def forward(source: socket.socket, sink: socket.socket, *, may_cut: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                passed += len(data)
                if may_cut and passed > cut_after:
                    with lock:
                        cut = left[0] > 0
                        left[0] -= cut
                    if cut:
                        has_cut.set()
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((target.hostname, target.port))
            pair = [
                threading.Thread(target=forward, args=(near, far), kwargs={"may_cut": False}),
                threading.Thread(target=forward, args=(far, near), kwargs={"may_cut": True}),
            ]
            for thread in pair:
                thread.start()
            closer = threading.Thread(target=_close_after, args=(pair, (near, far)))
            closer.start()
            threads.append(closer)

    acceptor = threading.Thread(target=serve)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", has_cut
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def _close_after(threads: list[threading.Thread], ends: tuple[socket.socket, ...]) -> None:
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def test_a_reply_that_breaks_in_its_first_words_is_a_storage_error() -> None:
    """Not one that is waited for without end, as an interim reply would be by botocore."""

    class BreaksOff(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), BreaksOff)
    store = Storage(
        endpoint_url=f"http://127.0.0.1:{server.server_address[1]}",
        region="us-east-1",
        bucket="any",
        access_key_id="key",
        secret_access_key="secret",
    )
    with server, closing(store), running(server.serve_forever):
        with pytest.raises(StorageError):
            store.put("key", b"bytes")
        server.shutdown()
