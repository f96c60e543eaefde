"""What does a reader get whose file is deleted under it, or whose connection is cut?"""

import hashlib
from contextlib import suppress

import httpx
import pytest

from service.ids import Prefix, parse
from service.storage import MissingObject
from tests.e2e.chaos.phases import persistently
from tests.e2e.chaos.stack import Stack, until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

# More than what sockets and relays hold between the store and a client that does not read.
DATA = b"".join(hashlib.sha256(b"%d" % n).hexdigest().encode() + b"\n" for n in range(600_000))


def put_up(stack: Stack) -> str:
    form = {"files": {"file": ("a.txt", DATA)}, "data": {"purpose": "user_data"}}
    return str(persistently(stack, lambda http: http.post("files", **form)).json()["id"])


def key_of(stack: Stack, file: str) -> str:
    raw = parse(Prefix.FILE, file)
    ((key,),) = stack.query("SELECT storage_key FROM files WHERE id = %s", raw)
    return str(key)


def is_gone(stack: Stack, key: str) -> bool:
    try:
        stack.storage.size(key)
    except MissingObject:
        return True
    return False


def test_a_file_deleted_under_its_reader_gives_its_own_bytes_or_breaks_off(stack: Stack) -> None:
    stack.at_rest()
    file = put_up(stack)
    key, read = key_of(stack, file), b""
    with (
        suppress(httpx.TransportError),
        stack.http.stream("GET", f"files/{file}/content") as reply,
    ):
        assert int(reply.headers["content-length"]) == len(DATA)
        pieces = reply.iter_raw(64 * 1024)
        read = next(pieces)
        persistently(stack, lambda http: http.delete(f"files/{file}"))
        until(lambda: is_gone(stack, key), 60, "the bytes are removed")
        for piece in pieces:
            read += piece
        assert len(read) == len(DATA)  # whoever gets an end gets all of it
    assert read == DATA[: len(read)]
    assert stack.http.get(f"files/{file}").status_code == 404


def test_a_reader_that_was_cut_off_goes_on_where_it_was(stack: Stack) -> None:
    stack.at_rest()
    file = put_up(stack)
    read, cuts = b"", 0
    while len(read) < len(DATA):
        headers = {"range": f"bytes={len(read)}-"}
        with (
            suppress(httpx.TransportError),
            stack.http.stream("GET", f"files/{file}/content", headers=headers) as reply,
        ):
            if reply.status_code >= 500:  # the API has lost its own connections
                continue
            assert reply.status_code == 206
            for piece in reply.iter_raw(64 * 1024):
                read += piece
                if cuts < 3 and len(read) > (cuts + 1) * len(DATA) // 4:
                    cuts += 1
                    stack.relay.cut(replies=0)
    assert cuts == 3
    assert read == DATA
