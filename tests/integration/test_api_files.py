"""Can files be put up by the official client and by plain HTTP? Does a failure leave nothing?"""

import hashlib
import io
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest

from service.db.session import Database
from service.settings import MIB, Settings
from service.stack.parts import EmbeddedUrls
from service.storage import Storage
from tests.integration.api_server import LINES, STUBS, Api, Server, api_over, api_server, eventually

DAY = 86_400


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


def test_a_file_comes_back_as_it_went_up(api: Api) -> None:
    made = api.upload()
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
    made = api.upload(data)
    assert made.bytes == len(data)
    with api.client() as client:
        read = client.files.content(made.id).read()
    assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()


def test_expires_after_is_kept(api: Api) -> None:
    made = api.upload(expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600


def test_a_file_for_another_purpose_does_not_expire(api: Api) -> None:
    made = api.upload(name="cat.png", purpose="vision")
    assert (made.purpose, made.expires_at) == ("vision", None)


def test_the_file_may_come_before_its_purpose(api: Api) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + LINES
        + b'\r\n--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'
    )
    response = api.post_file(
        content=body, headers={"content-type": "multipart/form-data; boundary=B"}
    )
    assert response.status_code == 200, response.text
    assert response.json()["bytes"] == len(LINES)


@pytest.mark.parametrize("name", ["ü漢🎈.jsonl", 'quo"te.jsonl', "../../up.jsonl", "a;b=c.jsonl"])
def test_any_printable_name_is_kept_and_sent_back(api: Api, name: str) -> None:
    made = api.upload(name=name)
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
    response = api.post_file(**form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert api.objects() == []
    assert api.rows() == 0


def test_a_wrong_ending_has_the_reference_s_words(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.upload(name="a.csv")
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
    response = api.post_file(
        content=body, headers={"content-type": "multipart/form-data; boundary=B"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "file"


def test_a_form_that_is_cut_off_is_400_and_leaves_nothing(api: Api) -> None:
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + b"x" * (9 * MIB)
    )
    response = api.post_file(
        content=body, headers={"content-type": "multipart/form-data; boundary=B"}
    )
    assert response.status_code == 400
    assert api.objects() == []
    assert api.rows() == 0


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
    assert api.rows() == 0


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

    response = api.post_file(
        content=endless(), headers={"content-type": "multipart/form-data; boundary=B"}
    )
    assert response.status_code == 413
    assert str(40 * MIB) in response.json()["error"]["message"]
    assert api.objects() == []
    assert api.rows() == 0


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


def test_a_store_that_is_away_is_503_and_leaves_no_row(
    settings: Settings, database: Database
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            closing(
                Storage.from_settings(settings.model_copy(update={"s3_endpoint_url": url}))
            ) as away,
            api_over(settings, database, away) as api,
        ):
            response = api.post_file(files={"file": ("a.jsonl", LINES)}, data={"purpose": "batch"})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "service_unavailable"
            assert api.rows() == 0
