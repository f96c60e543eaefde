"""Can files be listed, read, deleted and outlived, whoever else uses them meanwhile?"""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import openai
import pytest
from sqlalchemy import update

from service.batch import BatchStatus
from service.db import batches, files
from service.db.models import File, Right
from service.db.session import now
from service.ids import Prefix, parse
from service.settings import MIB
from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import LINES, STUBS, Api, Server, api_server, eventually


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.project()


def test_the_pager_gives_every_file_once_while_files_are_added(api: Api) -> None:
    before = [api.upload(name=f"{number}.jsonl").id for number in range(7)]
    with api.client() as client:
        seen = []
        for file in client.files.list(limit=2):
            seen.append(file.id)
            if len(seen) % 3 == 0:
                api.upload(name="late.jsonl")
    assert seen == before[::-1]


def test_the_pager_turns_while_what_it_gave_is_deleted(api: Api) -> None:
    before = [api.upload().id for _ in range(5)]
    with api.client() as client:
        seen = []
        for file in client.files.list(limit=2, order="asc"):
            client.files.delete(file.id)
            seen.append(file.id)
        assert seen == before
        assert client.files.list().data == []


def test_a_list_is_cut_by_purpose_order_and_limit(api: Api) -> None:
    first, picture, last = api.upload(), api.upload(purpose="vision"), api.upload()
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
    made = api.upload()
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
    made = api.upload()
    with api.http() as http:
        url = f"/v1/files/{made.id}/content"
        etag = http.get(url).headers["etag"]
        same = http.get(url, headers={"range": "bytes=0-1", "if-range": etag})
        other = http.get(url, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


def test_a_deleted_file_is_gone_with_its_bytes(api: Api) -> None:
    made = api.upload()
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
    made = api.upload()
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
    made = api.upload()
    with api.database.transaction() as session:
        session.execute(
            update(File)
            .where(File.project_id == api.project_id)
            .values(expires_at=now(session) - timedelta(seconds=1))
        )
    with api.client() as client:
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert client.files.list().data == []


def test_a_file_of_another_project_is_not_there(api: Api) -> None:
    made = api.upload()
    stranger = api.other_key(elsewhere=True)
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
    made = api.upload()
    api.storage.delete(api.objects())
    with api.http() as http:
        response = http.get(f"/v1/files/{made.id}/content")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_a_reader_may_read_what_another_key_put_up(api: Api) -> None:
    made = api.upload()
    with api.client(api.other_key(Right.READ)) as client:
        assert client.files.content(made.id).read() == LINES


def test_a_file_that_is_being_made_an_input_is_not_deleted_under_the_batch(api: Api) -> None:
    made = api.upload()
    file_id = parse(Prefix.FILE, made.id)
    assert file_id is not None
    with api.http() as http, ThreadPoolExecutor(1) as beside:
        with api.database.transaction() as session:
            at = now(session)
            assert files.hold(session, api.project_id, file_id, at) is not None
            deleting = beside.submit(http.delete, f"/v1/files/{made.id}")
            eventually(lambda: api.waiting() > 0)
            assert not deleting.done()
            batches.create(
                session,
                project_id=api.project_id,
                endpoint="/v1/embeddings",
                input_file_id=file_id,
                completion_window="24h",
                window=timedelta(hours=24),
                metadata=None,
                output_expires_after_s=None,
                now=at,
            )
        assert deleting.result().status_code == 200
    assert len(api.objects()) == 1


def test_a_file_that_is_being_deleted_becomes_no_input(api: Api) -> None:
    made = api.upload()
    file_id = parse(Prefix.FILE, made.id)
    assert file_id is not None
    body = {"input_file_id": made.id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    with api.http() as http, ThreadPoolExecutor(1) as beside:
        with api.database.transaction() as session:
            assert files.mark_deleted(session, api.project_id, file_id, now(session)) is not None
            creating = beside.submit(http.post, "/v1/batches", json=body)
            eventually(lambda: api.waiting() > 0)
        assert creating.result().status_code == 400


def test_a_download_that_is_broken_off_does_no_harm(api: Api) -> None:
    made = api.upload(b"x" * (20 * MIB))
    with api.http() as http:
        for _ in range(3):
            with http.stream("GET", f"/v1/files/{made.id}/content") as response:
                next(response.iter_bytes(1000))
        whole = http.get(f"/v1/files/{made.id}/content")
    assert len(whole.content) == 20 * MIB
    gc.collect()  # a connection that nobody closed would be warned of here
