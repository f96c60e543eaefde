"""Can files be put up, listed, read and deleted, by the official client and by plain HTTP?"""

import hashlib
import io
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import func, select, update

from service.batch import BatchStatus
from service.db import batches
from service.db.models import File, Right
from service.db.session import Database, now
from service.ids import Prefix, parse
from service.settings import MIB, Settings
from service.storage import Storage
from tests.integration.api_server import Api, api_over, eventually

LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
DAY = 86_400


@pytest.fixture
def api(settings: Settings, database: Database, storage: Storage) -> Iterator[Api]:
    small = settings.model_copy(update={"max_file_bytes": 40 * MIB})
    with api_over(small, database, storage) as running:
        yield running


def _upload(api: Api, data: bytes = LINES, name: str = "a.jsonl", **more: Any) -> Any:
    with api.client() as client:
        return client.files.create(file=(name, data), **{"purpose": "batch", **more})


def _rows(api: Api) -> int:
    with api.database.transaction() as session:
        return session.scalar(select(func.count()).select_from(File)) or 0


def _post(api: Api, **form: Any) -> httpx.Response:
    with api.http() as http:
        return http.post("/v1/files", **form)


def test_a_file_comes_back_as_it_went_up(api: Api) -> None:
    made = _upload(api)
    assert made.object == "file"
    assert made.bytes == len(LINES)
    assert made.filename == "a.jsonl"
    assert made.purpose == "batch"
    assert made.status == "processed"
    assert made.status_details is None
    assert made.expires_at == made.created_at + 30 * DAY
    with api.client() as client:
        assert client.files.retrieve(made.id) == made
        assert client.files.content(made.id).read() == LINES
        assert [file.id for file in client.files.list()] == [made.id]


def test_a_large_file_is_streamed_in_parts(api: Api) -> None:
    data = hashlib.shake_128(b"large").digest(20 * MIB + 77)
    made = _upload(api, data)
    assert made.bytes == len(data)
    with api.client() as client:
        read = client.files.content(made.id).read()
    assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()


def test_expires_after_is_kept(api: Api) -> None:
    made = _upload(api, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600


def test_a_file_for_another_purpose_does_not_expire(api: Api) -> None:
    made = _upload(api, name="cat.png", purpose="vision")
    assert (made.purpose, made.expires_at) == ("vision", None)


def test_the_file_may_come_before_its_purpose(api: Api) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + LINES
        + b'\r\n--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'
    )
    response = _post(api, content=body, headers={"content-type": "multipart/form-data; boundary=B"})
    assert response.status_code == 200, response.text
    assert response.json()["bytes"] == len(LINES)


@pytest.mark.parametrize("name", ["ü漢🎈.jsonl", 'quo"te.jsonl', "../../up.jsonl", "a;b=c.jsonl"])
def test_any_printable_name_is_kept_and_sent_back(api: Api, name: str) -> None:
    made = _upload(api, name=name)
    with api.http() as http:
        response = http.get(f"/v1/files/{made.id}/content")
    assert response.content == LINES
    assert "\n" not in response.headers["content-disposition"]
    assert response.headers["content-disposition"].startswith('attachment; filename="')
    assert response.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": ("a.jsonl", LINES)}}, "purpose"),
        ({"files": {"purpose": (None, "batch")}}, "file"),
        ({"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "other"}}, "purpose"),
        ({"files": {"file": ("a.jsonl", b"")}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("a.json", LINES)}, "data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch", "x": "y"}}, "x"),
        ({"data": {"purpose": "batch"}}, None),
        ({"content": b"raw", "headers": {"content-type": "multipart/form-data"}}, None),
        ({"json": {"purpose": "batch"}}, None),
    ],
)
def test_a_wrong_upload_is_400_and_leaves_nothing(
    api: Api, form: dict[str, Any], param: str | None
) -> None:
    response = _post(api, **form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert api.objects() == []
    assert _rows(api) == 0


def test_a_wrong_ending_has_the_reference_s_words(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _upload(api, name="a.csv")
    assert caught.value.body == {
        "message": "Invalid file format for Batch API. Must be .jsonl",
        "type": "invalid_request_error",
        "param": "file",
        "code": "invalid_file_format",
    }


def test_a_nul_in_a_filename_is_400(api: Api) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a\0.jsonl"\r\n\r\n'
        b"x\r\n--B--\r\n"
    )
    response = _post(api, content=body, headers={"content-type": "multipart/form-data; boundary=B"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "file"


def test_a_form_that_is_cut_off_is_400_and_leaves_nothing(api: Api) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + b"x" * (9 * MIB)
    )
    response = _post(api, content=body, headers={"content-type": "multipart/form-data; boundary=B"})
    assert response.status_code == 400
    assert api.objects() == []
    assert _rows(api) == 0


def test_a_client_that_goes_away_leaves_nothing(api: Api) -> None:
    with closing(socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])))) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + api.key.encode()
            + b"\r\nContent-Type: multipart/form-data; boundary=B"
            + f"\r\nContent-Length: {30 * MIB}\r\n\r\n".encode()
            + b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        )
        for _ in range(20):
            raw.sendall(b"x" * MIB)
        eventually(lambda: api.objects() != [])  # a multipart upload has begun
    eventually(lambda: api.objects() == [])
    assert _rows(api) == 0


def test_a_file_that_says_it_is_too_large_is_413_before_it_is_read(api: Api) -> None:
    with closing(socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])))) as raw:
        raw.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + api.key.encode()
            + b"\r\nContent-Type: multipart/form-data; boundary=B"
            + f"\r\nContent-Length: {41 * MIB}\r\n\r\n".encode()
        )
        assert raw.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_file_that_turns_out_too_large_is_413_and_leaves_nothing(api: Api) -> None:
    def endless() -> Iterator[bytes]:
        yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(41):
            yield b"x" * MIB

    response = _post(
        api, content=endless(), headers={"content-type": "multipart/form-data; boundary=B"}
    )
    assert response.status_code == 413
    assert str(40 * MIB) in response.json()["error"]["message"]
    assert api.objects() == []
    assert _rows(api) == 0


def test_the_pager_gives_every_file_once_while_files_are_added(api: Api) -> None:
    before = [_upload(api, name=f"{number}.jsonl").id for number in range(7)]
    with api.client() as client:
        seen = []
        for file in client.files.list(limit=2):
            seen.append(file.id)
            if len(seen) % 3 == 0:
                _upload(api, name="late.jsonl")
    assert seen == before[::-1]


def test_the_pager_turns_while_what_it_gave_is_deleted(api: Api) -> None:
    before = [_upload(api).id for _ in range(5)]
    with api.client() as client:
        seen = []
        for file in client.files.list(limit=2, order="asc"):
            client.files.delete(file.id)
            seen.append(file.id)
        assert seen == before
        assert client.files.list().data == []


def test_a_list_is_cut_by_purpose_order_and_limit(api: Api) -> None:
    first, picture, last = _upload(api), _upload(api, purpose="vision"), _upload(api)
    with api.http() as http:

        def listed(query: str) -> tuple[list[str], bool]:
            page = http.get(f"/v1/files?{query}").json()
            ids = [file["id"] for file in page["data"]]
            assert page["object"] == "list"
            assert (page["first_id"], page["last_id"]) == (
                (ids[0], ids[-1]) if ids else (None, None)
            )
            return ids, page["has_more"]

        assert listed("") == ([last.id, picture.id, first.id], False)
        assert listed("order=asc") == ([first.id, picture.id, last.id], False)
        assert listed("purpose=batch") == ([last.id, first.id], False)
        assert listed("purpose=unheard_of") == ([], False)
        assert listed("limit=2") == ([last.id, picture.id], True)
        assert listed(f"limit=2&after={picture.id}") == ([first.id], False)
        assert listed(f"order=asc&after={picture.id}") == ([last.id], False)


@pytest.mark.parametrize(
    ("range_", "status", "content"),
    [
        ("bytes=0-4", 206, LINES[:5]),
        ("bytes=5-", 206, LINES[5:]),
        ("bytes=-7", 206, LINES[-7:]),
        ("bytes=5-10000", 206, LINES[5:]),
        ("bytes=0-1,3-4", 200, LINES),
        ("lines=1-2", 200, LINES),
        ("bytes=10000-", 416, None),
    ],
)
def test_a_range_is_honoured(api: Api, range_: str, status: int, content: bytes | None) -> None:
    made = _upload(api)
    with api.http() as http:
        response = http.get(f"/v1/files/{made.id}/content", headers={"range": range_})
    assert response.status_code == status
    if content is None:
        assert response.json()["error"]["code"] == "range_not_satisfiable"
        assert response.headers["content-range"] == f"bytes */{len(LINES)}"
        return
    assert response.content == content
    assert response.headers["content-length"] == str(len(content))
    if status == 206:
        start = LINES.index(content) if len(content) > 7 or content != LINES[-7:] else 31
        assert response.headers["content-range"].endswith(f"/{len(LINES)}")
        assert response.headers["content-range"].startswith("bytes ")
        assert LINES[start:].startswith(content)


def test_a_range_of_another_content_is_not_mixed_in(api: Api) -> None:
    made = _upload(api)
    with api.http() as http:
        url = f"/v1/files/{made.id}/content"
        etag = http.get(url).headers["etag"]
        same = http.get(url, headers={"range": "bytes=0-1", "if-range": etag})
        other = http.get(url, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


def test_a_deleted_file_is_gone_with_its_bytes(api: Api) -> None:
    made = _upload(api)
    with api.client() as client:
        deleted = client.files.delete(made.id)
        assert deleted.model_dump() == {"id": made.id, "object": "file", "deleted": True}
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert client.files.list().data == []
    assert api.objects() == []


@pytest.mark.parametrize("ended", [False, True])
def test_an_unfinished_batch_keeps_the_bytes_of_a_deleted_input(api: Api, ended: bool) -> None:
    made = _upload(api)
    with api.client() as client:
        batch = client.batches.create(
            input_file_id=made.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        if ended:
            batch_id = parse(Prefix.BATCH, batch.id)
            assert batch_id is not None
            with api.database.transaction() as session:
                batches.move(session, batch_id, BatchStatus.FAILED, now(session))
        client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made.id)
    assert bool(api.objects()) is not ended


def test_an_expired_file_is_gone_at_once(api: Api) -> None:
    made = _upload(api)
    with api.database.transaction() as session:
        session.execute(update(File).values(expires_at=now(session) - timedelta(seconds=1)))
    with api.client() as client:
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert client.files.list().data == []


def test_a_file_of_another_project_is_not_there(api: Api) -> None:
    made = _upload(api)
    stranger = api.other_key(project="stranger")
    with api.client(stranger) as client:
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert client.files.list().data == []
        with pytest.raises(openai.BadRequestError):
            client.files.list(after=made.id)
    with api.client() as client:
        assert client.files.content(made.id).read() == LINES


@pytest.mark.parametrize(
    "file_id", ["file-0", "nonsense", "batch_" + "0" * 32, "%00", "file-" + "0" * 32]
)
def test_an_unknown_file_is_404_in_shape(api: Api, file_id: str) -> None:
    with api.http() as http:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            response = http.request(method, f"/v1/files/{file_id}{path}")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "not_found"


def test_content_whose_bytes_are_lost_is_a_clean_404(api: Api) -> None:
    made = _upload(api)
    api.storage.delete(api.objects())
    with api.http() as http:
        response = http.get(f"/v1/files/{made.id}/content")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_a_reader_may_read_what_another_key_put_up(api: Api) -> None:
    made = _upload(api)
    with api.client(api.other_key(Right.READ)) as client:
        assert client.files.content(made.id).read() == LINES


def test_a_file_object_and_a_path_upload_alike(api: Api, tmp_path: Any) -> None:
    path = tmp_path / "from_disk.jsonl"
    path.write_bytes(LINES)
    with api.client() as client:
        from_path = client.files.create(file=path, purpose="batch")
        with path.open("rb") as opened:
            from_open = client.files.create(file=opened, purpose="batch")
        from_memory = client.files.create(file=("m.jsonl", io.BytesIO(LINES)), purpose="batch")
    assert {from_path.bytes, from_open.bytes, from_memory.bytes} == {len(LINES)}
    assert from_path.filename == from_open.filename == "from_disk.jsonl"
