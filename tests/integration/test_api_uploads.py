"""Can a large file be put up in parts, by the official client as it is, and becomes it one file?"""

import hashlib
import io
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import anyio
import openai
import pytest
from openai.types import Upload
from sqlalchemy import func, select, update

from service.api.deps import JOINS
from service.db import upload_models
from service.db.session import now
from service.ids import Prefix, new_id, parse, show
from service.settings import MIB
from service.stack.parts import EmbeddedUrls
from service.storage import ObjectWriter, StorageError
from service.upload import UPLOAD_MOVES, UploadStatus
from tests.integration.api_server import STUBS, Api, Server, api_server, eventually

DATA = b'{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom_id": "c"}\n'


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


def begin(client: openai.OpenAI, data: bytes = DATA, **more: Any) -> Upload:
    wanted = {
        "bytes": len(data),
        "filename": "a.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
        **more,
    }
    return client.uploads.create(**wanted)


def put(client: openai.OpenAI, upload: Upload, *pieces: bytes) -> list[str]:
    return [client.uploads.parts.create(upload.id, data=piece).id for piece in pieces]


def row(api: Api, upload: Upload) -> upload_models.Upload:
    with api.database.transaction() as session:
        return session.get_one(upload_models.Upload, parse(Prefix.UPLOAD, upload.id))


def past_its_time(api: Api, upload: Upload) -> None:
    with api.database.transaction() as session:
        session.execute(
            update(upload_models.Upload)
            .where(upload_models.Upload.id == parse(Prefix.UPLOAD, upload.id))
            .values(expires_at=now(session))
        )


def part_objects(api: Api) -> list[str]:
    return [key for key in api.objects() if key.startswith("uploads/")]


def file_objects(api: Api) -> list[str]:
    return [key for key in api.objects() if key.startswith("files/")]


def test_an_upload_becomes_a_file(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        assert upload.object == "upload"
        assert upload.status == "pending"
        assert upload.file is None
        assert (upload.bytes, upload.filename, upload.purpose) == (len(DATA), "a.jsonl", "batch")
        assert upload.expires_at == upload.created_at + 3600
        part = client.uploads.parts.create(upload.id, data=DATA)
        assert part.object == "upload.part"
        assert part.upload_id == upload.id
        assert part.id.startswith("part_")
        done = client.uploads.complete(upload.id, part_ids=[part.id])
        assert done.status == "completed"
        assert done.file is not None
        assert done.file == client.files.retrieve(done.file.id)
        assert done.file.expires_at == done.file.created_at + 30 * 86_400
        assert client.files.content(done.file.id).read() == DATA
        assert set(done.model_dump()) == set(upload.model_dump()) == set(Upload.model_fields)


def test_the_client_s_own_chunking_works(api: Api, tmp_path: Any) -> None:
    data = hashlib.shake_128(b"chunked").digest(3 * MIB + 5)
    path = tmp_path / "large.jsonl"
    path.write_bytes(data)
    with api.client() as client:
        from_path = client.uploads.upload_file_chunked(
            file=path,
            mime_type="application/jsonl",
            purpose="batch",
            part_size=MIB,
            md5=hashlib.md5(data, usedforsecurity=False).hexdigest().upper(),
        )
        from_memory = client.uploads.upload_file_chunked(
            file=data,
            filename="memory.jsonl",
            bytes=len(data),
            mime_type="application/jsonl",
            purpose="batch",
        )
        for done in (from_path, from_memory):
            assert done.file is not None
            assert client.files.content(done.file.id).read() == data


def test_the_asynchronous_client_s_own_chunking_works(api: Api) -> None:
    async def chunked() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{api.url}/v1", api_key=api.key, max_retries=0
        ) as client:
            done = await client.uploads.upload_file_chunked(
                file=DATA,
                filename="a.jsonl",
                bytes=len(DATA),
                mime_type="application/jsonl",
                purpose="batch",
                part_size=7,
            )
            assert done.file is not None
            assert (await client.files.content(done.file.id)).content == DATA

    anyio.run(chunked)


def test_parts_of_any_size_sent_by_many_threads_in_any_order_are_joined_in_the_order_named(
    api: Api,
) -> None:
    random_ = random.Random(7)
    data = hashlib.shake_128(b"threads").digest(12 * MIB)
    cuts = sorted({0, 1, len(data), *(random_.randrange(len(data)) for _ in range(18))})
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    order = random_.sample(range(len(pieces)), len(pieces))
    with api.client() as client, ThreadPoolExecutor(8) as threads:
        upload = begin(client, data)
        sent = threads.map(lambda index: (index, put(client, upload, pieces[index])[0]), order)
        part_ids = [part_id for _, part_id in sorted(sent)]
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        done = client.uploads.complete(upload.id, part_ids=part_ids, md5=md5)
        assert done.file is not None
        read = client.files.content(done.file.id).read()
    assert hashlib.sha256(read).digest() == hashlib.sha256(data).digest()
    held = row(api, upload)
    assert (held.received_parts, held.received_bytes) == (len(pieces), len(data))


def test_an_expiry_of_the_file_is_counted_from_the_file(api: Api) -> None:
    with api.client() as client:
        expires = {"anchor": "created_at", "seconds": 7200}
        upload = begin(client, expires_after=expires)
        done = client.uploads.complete(upload.id, part_ids=put(client, upload, DATA))
        assert done.file is not None
        assert done.file.expires_at == done.file.created_at + 7200
        picture = begin(client, filename="cat.png", mime_type="image/png", purpose="vision")
        done = client.uploads.complete(picture.id, part_ids=put(client, picture, DATA))
        assert done.file is not None
        assert done.file.expires_at is None


@pytest.mark.parametrize(
    ("changed", "param", "code"),
    [
        ({"bytes": 0}, "bytes", "invalid_value"),
        ({"bytes": -1}, "bytes", "invalid_value"),
        ({"bytes": "5"}, "bytes", "invalid_type"),
        ({"bytes": None}, "bytes", "invalid_type"),
        ({"filename": ""}, "filename", "invalid_value"),
        ({"filename": "a.txt"}, "filename", "invalid_file_format"),
        ({"filename": "a\n.jsonl"}, "filename", "invalid_value"),
        ({"filename": "a\0.jsonl"}, "filename", "invalid_value"),
        ({"filename": "a" * 250 + ".jsonl"}, "filename", "invalid_value"),
        ({"mime_type": ""}, "mime_type", "invalid_value"),
        ({"mime_type": "a\0"}, "mime_type", "invalid_value"),
        ({"mime_type": 5}, "mime_type", "invalid_type"),
        ({"purpose": "batch_output"}, "purpose", "invalid_value"),
        ({"purpose": 5}, "purpose", "invalid_value"),
        ({"color": "red"}, "color", "unknown_parameter"),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after.anchor", None),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds", None),
    ],
)
def test_a_wrong_upload_names_the_field(
    api: Api, changed: dict[str, Any], param: str, code: str | None
) -> None:
    with api.client() as client, pytest.raises(openai.BadRequestError) as caught:
        begin(client, extra_body=changed)
    assert caught.value.param == param
    assert code is None or caught.value.code == code


def test_half_a_character_is_400(api: Api) -> None:
    body = {"bytes": 1, "filename": "a\ud800.jsonl", "mime_type": "x", "purpose": "batch"}
    with api.http() as http:
        response = http.post("/v1/uploads", content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "filename"


@pytest.mark.parametrize("missing", ["bytes", "filename", "mime_type", "purpose"])
def test_a_missing_field_is_named(api: Api, missing: str) -> None:
    body = {"bytes": 1, "filename": "a.jsonl", "mime_type": "x", "purpose": "batch"}
    del body[missing]
    with api.http() as http:
        error = http.post("/v1/uploads", json=body).json()["error"]
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


def test_the_limit_itself_is_taken_and_one_byte_more_is_413(api: Api) -> None:
    most = api.settings.max_upload_bytes
    with api.client() as client:
        assert begin(client, extra_body={"bytes": most}).bytes == most
        with pytest.raises(openai.APIStatusError) as caught:
            begin(client, extra_body={"bytes": most + 1})
    assert caught.value.status_code == 413
    assert str(most) in caught.value.message


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"data": ("x", b"")}}, "data"),
        ({"files": {"file": (None, "x")}}, "file"),
        ({"files": {"other": ("x", b"x")}}, "other"),
        ({"files": [("data", ("x", b"x")), ("data", ("y", b"y"))]}, "data"),
        ({"json": {"data": "x"}}, None),
        ({"content": b"--B--\r\n", "headers": {"content-type": "multipart/form-data; boundary=B"}},
         "data"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_400_and_leaves_nothing(
    api: Api, form: dict[str, Any], param: str | None
) -> None:
    with api.client() as client, api.http() as http:
        upload = begin(client)
        response = http.post(f"/v1/uploads/{upload.id}/parts", **form)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert api.objects() == []
    assert row(api, upload).received_parts == 0


def test_a_part_needs_no_filename(api: Api) -> None:
    with api.client() as client, api.http() as http:
        upload = begin(client)
        response = http.post(f"/v1/uploads/{upload.id}/parts", files={"data": (None, DATA)})
        done = client.uploads.complete(upload.id, part_ids=[response.json()["id"]])
        assert done.status == "completed"


@contextmanager
def allowing(api: Api, **limits: Any) -> Iterator[None]:
    """The server's settings are frozen; for a moment they are others."""
    before = {name: getattr(api.settings, name) for name in limits}
    for name, value in limits.items():
        object.__setattr__(api.settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(api.settings, name, value)


def test_a_part_over_the_limit_is_413_and_leaves_nothing(api: Api) -> None:
    with api.client() as client, allowing(api, max_part_bytes=MIB):
        upload = begin(client)
        put(client, upload, b"x" * MIB)
        before = api.objects()
        for size in (MIB + 1, 9 * MIB):
            with pytest.raises(openai.APIStatusError) as caught:
                put(client, upload, b"x" * size)
            assert caught.value.status_code == 413
            assert str(MIB) in caught.value.message
    assert api.objects() == before


def test_parts_may_be_sent_twice_but_not_without_end(api: Api) -> None:
    with api.client() as client, allowing(api, max_part_bytes=len(DATA)):
        upload = begin(client)
        part_ids = put(client, upload, DATA, DATA, DATA)
        with pytest.raises(openai.APIStatusError) as caught:
            put(client, upload, b"x")
        assert caught.value.status_code == 413
        assert client.uploads.complete(upload.id, part_ids=part_ids[1:2]).status == "completed"
    assert len(part_objects(api)) == 3


@pytest.mark.parametrize("wrong", ["twice", "unknown", "foreign", "none", "nonsense", "too few"])
def test_wrong_parts_are_400_and_the_upload_can_still_be_completed(api: Api, wrong: str) -> None:
    with api.client() as client:
        upload, other = begin(client), begin(client)
        part_ids = put(client, upload, DATA[:10], DATA[10:])
        wrongs = {
            "twice": [part_ids[0], part_ids[1], part_ids[1]],
            "unknown": [part_ids[0], show(Prefix.PART, new_id())],
            "foreign": [part_ids[0], *put(client, other, DATA[10:])],
            "none": [],
            "nonsense": [part_ids[0], "x\0"],
            "too few": part_ids[:1],
        }
        with pytest.raises(openai.BadRequestError) as caught:
            client.uploads.complete(upload.id, part_ids=wrongs[wrong])
        assert caught.value.param == "part_ids"
        assert client.uploads.complete(upload.id, part_ids=part_ids).status == "completed"
    assert len(file_objects(api)) == 1


@pytest.mark.parametrize("md5", ["0" * 32, "x" * 32, "0" * 31, "", "rL0Y20zC+Fzt72VPzMSk2A=="])
def test_a_wrong_checksum_is_400_and_the_upload_can_still_be_completed(api: Api, md5: str) -> None:
    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA)
        with pytest.raises(openai.BadRequestError) as caught:
            client.uploads.complete(upload.id, part_ids=part_ids, md5=md5)
        assert caught.value.param == "md5"
        assert file_objects(api) == []
        assert client.uploads.complete(upload.id, part_ids=part_ids).status == "completed"


def test_completing_again_gives_the_same_file(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA[:10], DATA[10:])
        first = client.uploads.complete(upload.id, part_ids=part_ids)
        assert client.uploads.complete(upload.id, part_ids=part_ids) == first
        with pytest.raises(openai.ConflictError):
            client.uploads.complete(upload.id, part_ids=part_ids[::-1])
    assert api.rows() == 1
    assert len(file_objects(api)) == 1


def test_twins_completing_at_once_give_one_file(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(3)
    finish = ObjectWriter.finish

    def together(self: ObjectWriter) -> None:
        finish(self)
        meet.wait(30)

    with api.client() as client, ThreadPoolExecutor(3) as threads:
        upload = begin(client)
        part_ids = put(client, upload, DATA[:10], DATA[10:])
        monkeypatch.setattr(ObjectWriter, "finish", together)
        calls = [
            threads.submit(client.uploads.complete, upload.id, part_ids=part_ids) for _ in range(3)
        ]
        first, *others = [call.result() for call in calls]
    assert others == [first, first]
    assert api.rows() == 1
    assert len(file_objects(api)) == 1


def test_few_are_joined_at_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a thread for as long as its file takes; other calls must find one too."""
    lock, all_in = threading.Lock(), threading.Barrier(JOINS)
    now_in, most_in = 0, 0
    finish = ObjectWriter.finish

    def counted(self: ObjectWriter) -> None:
        nonlocal now_in, most_in
        with lock:
            now_in += 1
            most_in = max(most_in, now_in)
        all_in.wait(30)
        finish(self)
        with lock:
            now_in -= 1

    with api.client() as client, ThreadPoolExecutor(2 * JOINS) as threads:
        begun = [begin(client) for _ in range(2 * JOINS)]
        named = [(upload.id, put(client, upload, DATA)) for upload in begun]
        monkeypatch.setattr(ObjectWriter, "finish", counted)
        calls = [
            threads.submit(client.uploads.complete, upload_id, part_ids=part_ids)
            for upload_id, part_ids in named
        ]
        assert {call.result().status for call in calls} == {"completed"}
    assert most_in == JOINS


def test_a_twin_that_is_overtaken_stops_and_gives_the_same_file(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quicker one ends, and its parts are gone, while the slower one is in their midst."""
    begun, go_on = threading.Event(), threading.Event()
    write = ObjectWriter.write

    def slow(self: ObjectWriter, data: bytes) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        write(self, data)

    with api.client() as client, ThreadPoolExecutor(1) as threads:
        upload = begin(client)
        part_ids = put(client, upload, DATA[:10], DATA[10:])
        monkeypatch.setattr(ObjectWriter, "write", slow)
        slower = threads.submit(client.uploads.complete, upload.id, part_ids=part_ids)
        assert begun.wait(30)
        first = client.uploads.complete(upload.id, part_ids=part_ids)
        api.storage.delete(part_objects(api))
        go_on.set()
        assert slower.result() == first
    assert len(file_objects(api)) == 1


def test_a_completion_that_breaks_off_can_be_made_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ObjectWriter, data: bytes) -> None:
        raise StorageError("away")

    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA[:10], DATA[10:])
        with monkeypatch.context() as patched:
            patched.setattr(ObjectWriter, "write", broken)
            with pytest.raises(openai.InternalServerError):
                client.uploads.complete(upload.id, part_ids=part_ids)
        assert file_objects(api) == []
        assert row(api, upload).status is UploadStatus.PENDING
        assert client.uploads.complete(upload.id, part_ids=part_ids).status == "completed"


def test_a_completion_that_loses_to_a_cancel_leaves_no_file(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ObjectWriter.finish
    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA)

        def cancelled_meanwhile(self: ObjectWriter) -> None:
            finish(self)
            assert client.uploads.cancel(upload.id).status == "cancelled"

        monkeypatch.setattr(ObjectWriter, "finish", cancelled_meanwhile)
        with pytest.raises(openai.ConflictError):
            client.uploads.complete(upload.id, part_ids=part_ids)
    assert file_objects(api) == []
    assert api.rows() == 0


def test_a_cancelled_upload_stays_so(api: Api) -> None:
    with api.client(retries=2) as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA)
        for _ in range(2):
            assert client.uploads.cancel(upload.id).status == "cancelled"
        with pytest.raises(openai.ConflictError) as caught:
            client.uploads.complete(upload.id, part_ids=part_ids)
        assert caught.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.ConflictError):
            put(client, upload, DATA)
    assert len(part_objects(api)) == 1  # the sweep's


def test_a_completed_upload_stays_so(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        client.uploads.complete(upload.id, part_ids=put(client, upload, DATA))
        with pytest.raises(openai.ConflictError, match="completed"):
            client.uploads.cancel(upload.id)
        with pytest.raises(openai.ConflictError, match="completed"):
            put(client, upload, DATA)


def test_an_upload_past_its_time_is_over_before_anybody_has_noticed(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA)
        past_its_time(api, upload)
        with pytest.raises(openai.ConflictError, match="expired"):
            client.uploads.complete(upload.id, part_ids=part_ids)
        with pytest.raises(openai.ConflictError, match="expired"):
            put(client, upload, DATA)
        with pytest.raises(openai.ConflictError, match="expired"):
            client.uploads.cancel(upload.id)
    assert len(api.objects()) == 1


def test_a_completion_that_began_in_time_is_let_finish(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ObjectWriter.finish
    with api.client() as client:
        upload = begin(client)
        part_ids = put(client, upload, DATA)

        def late(self: ObjectWriter) -> None:
            finish(self)
            past_its_time(api, upload)

        monkeypatch.setattr(ObjectWriter, "finish", late)
        assert client.uploads.complete(upload.id, part_ids=part_ids).status == "completed"


def test_a_part_that_arrives_after_the_cancel_leaves_nothing(api: Api) -> None:
    with api.client() as client, api.http() as http, ThreadPoolExecutor(1) as beside:
        upload = begin(client)
        go_on = threading.Event()

        def body() -> Iterator[bytes]:
            yield b'--B\r\nContent-Disposition: form-data; name="data"; filename="x"\r\n\r\n'
            yield b"x" * (9 * MIB)
            assert go_on.wait(30)
            yield b"\r\n--B--\r\n"

        sending = beside.submit(
            http.post,
            f"/v1/uploads/{upload.id}/parts",
            content=body(),
            headers={"content-type": "multipart/form-data; boundary=B"},
        )
        eventually(lambda: api.objects() != [])
        client.uploads.cancel(upload.id)
        go_on.set()
        assert sending.result().status_code == 409
    assert api.objects() == []
    with api.database.transaction() as session:
        of_upload = upload_models.UploadPart.upload_id == parse(Prefix.UPLOAD, upload.id)
        query = select(func.count()).select_from(upload_models.UploadPart).where(of_upload)
        assert session.scalar(query) == 0


@pytest.mark.parametrize("upload_id", ["upload_0", "file-" + "0" * 32, "upload_" + "0" * 32, "%00"])
def test_an_unknown_upload_is_404_whatever_is_sent(api: Api, upload_id: str) -> None:
    with api.http() as http:
        for path in ("parts", "complete", "cancel"):
            response = http.post(f"/v1/uploads/{upload_id}/{path}", content=b"nonsense")
            assert response.status_code == 404, response.text
            assert response.json()["error"]["code"] == "not_found"


def test_an_upload_of_another_project_is_not_there(api: Api) -> None:
    with api.client() as client, api.client(api.other_key(elsewhere=True)) as stranger:
        upload = begin(client)
        part_ids = put(client, upload, DATA)
        for call in (
            lambda: put(stranger, upload, DATA),
            lambda: stranger.uploads.complete(upload.id, part_ids=part_ids),
            lambda: stranger.uploads.cancel(upload.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert client.uploads.complete(upload.id, part_ids=part_ids).status == "completed"


def test_a_batch_runs_on_what_was_uploaded(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        done = client.uploads.complete(upload.id, part_ids=put(client, upload, DATA))
        assert done.file is not None
        batch = client.batches.create(
            input_file_id=done.file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert batch.input_file_id == done.file.id


def test_an_open_file_is_chunked_too(api: Api) -> None:
    with api.client() as client:
        upload = begin(client)
        part = client.uploads.parts.create(upload.id, data=io.BytesIO(DATA))
        assert client.uploads.complete(upload.id, part_ids=[part.id]).status == "completed"


def test_every_end_of_an_upload_is_final() -> None:
    assert {status for status, after in UPLOAD_MOVES.items() if after} == {UploadStatus.PENDING}
    assert set(UPLOAD_MOVES) == set(UploadStatus)
