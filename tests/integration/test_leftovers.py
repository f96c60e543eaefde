"""Does what uploads and keys leave behind go, when it may, and nothing else?"""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from service.db import session, uploads
from service.db.models import File
from service.db.upload_models import IdempotencyKey, KeyedRoute, Upload, UploadPart
from service.ids import new_id
from service.settings import MIB
from service.storage import MissingObject, Storage, StorageError
from service.upload import UploadStatus
from tests.pipeline import Pipeline
from worker import leftovers


def begun(pipeline: Pipeline, parts: int = 2) -> Upload:
    """A pending upload with so many parts, as the API leaves it."""
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        upload = uploads.add(
            transaction,
            Upload(
                id=new_id(),
                project_id=pipeline.project_id,
                purpose="batch",
                filename="a.jsonl",
                mime_type="x",
                bytes=parts,
                created_at=now,
                expires_at=now + timedelta(hours=1),
            ),
        )
        for _ in range(parts):
            part_id = new_id()
            uploads.add_part(transaction, upload, part_id, 1, now)
            key = uploads.part_key(upload.project_id, upload.id, part_id)
            pipeline.resources.storage.put(key, b"x")
    return upload


def completed(pipeline: Pipeline) -> Upload:
    upload = begun(pipeline)
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        file = File(
            id=new_id(),
            project_id=upload.project_id,
            purpose="batch",
            filename="a.jsonl",
            bytes=2,
            storage_key=f"files/{upload.id.hex}",
            created_at=now,
        )
        transaction.add(file)
        transaction.flush()
        held = uploads.hold(transaction, upload.project_id, upload.id)
        assert held is not None
        ids = list(uploads.part_sizes(transaction, upload.id))
        uploads.complete(transaction, held, file.id, ids, now)
    return held


def later(pipeline: Pipeline, by: timedelta) -> None:
    """Everything about uploads and keys happened so much longer ago."""
    with pipeline.resources.database.transaction() as transaction:
        for upload in transaction.scalars(select(Upload)):
            upload.expires_at -= by
            if upload.removed_at is not None:
                upload.removed_at -= by
        for key in transaction.scalars(select(IdempotencyKey)):
            key.expires_at -= by


def keys_of(pipeline: Pipeline, upload: Upload) -> list[str]:
    prefix = f"uploads/{upload.project_id.hex}/{upload.id.hex}/"
    return list(pipeline.resources.storage.list(prefix))


def now_is(pipeline: Pipeline, upload: Upload) -> Upload | None:
    with pipeline.resources.database.transaction() as transaction:
        return transaction.get(Upload, upload.id)


def rows(pipeline: Pipeline, table: Any) -> int:
    with pipeline.resources.database.transaction() as transaction:
        return transaction.scalar(select(func.count()).select_from(table)) or 0


def test_a_pending_upload_is_left_alone(pipeline: Pipeline) -> None:
    upload = begun(pipeline)
    leftovers.sweep_all(pipeline.resources)
    assert len(keys_of(pipeline, upload)) == 2
    later(pipeline, timedelta(minutes=59))
    leftovers.sweep_all(pipeline.resources)
    found = now_is(pipeline, upload)
    assert found is not None
    assert found.status is UploadStatus.PENDING


def test_an_upload_past_its_time_expires_once_a_late_completion_has_had_its_chance(
    pipeline: Pipeline,
) -> None:
    upload = begun(pipeline)
    later(pipeline, timedelta(hours=1) + uploads.JOIN_GRACE - timedelta(minutes=1))
    leftovers.sweep_all(pipeline.resources)
    assert len(keys_of(pipeline, upload)) == 2
    later(pipeline, timedelta(minutes=1))
    leftovers.sweep_all(pipeline.resources)
    found = now_is(pipeline, upload)
    assert found is not None
    assert found.status is UploadStatus.EXPIRED
    assert keys_of(pipeline, upload) == []
    assert rows(pipeline, UploadPart) == 0


@pytest.mark.parametrize("end", ["completed", "cancelled"])
def test_the_parts_of_an_ended_upload_go_and_a_day_later_its_row(
    pipeline: Pipeline, end: str
) -> None:
    if end == "completed":
        upload = completed(pipeline)
    else:
        upload = begun(pipeline)
        with pipeline.resources.database.transaction() as transaction:
            held = uploads.hold(transaction, upload.project_id, upload.id)
            assert held is not None
            uploads.cancel(transaction, held, session.now(transaction))
    leftovers.sweep_all(pipeline.resources)
    assert keys_of(pipeline, upload) == []
    assert rows(pipeline, UploadPart) == 0
    found = now_is(pipeline, upload)
    assert found is not None
    assert found.status == end
    later(pipeline, uploads.KEPT - timedelta(minutes=1))
    leftovers.sweep_all(pipeline.resources)
    assert now_is(pipeline, upload) is not None
    later(pipeline, timedelta(minutes=1))
    leftovers.sweep_all(pipeline.resources)
    assert now_is(pipeline, upload) is None
    assert rows(pipeline, File) == (1 if end == "completed" else 0)


def test_parts_that_the_store_keeps_go_at_a_later_tick(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = completed(pipeline)

    def away(*_: object) -> None:
        raise StorageError("away")

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "delete", away)
        leftovers.sweep_uploads(pipeline.resources)
    assert len(keys_of(pipeline, upload)) == 2
    leftovers.sweep_uploads(pipeline.resources)
    assert keys_of(pipeline, upload) == []


def test_more_uploads_than_one_tick_takes_go_by_and_by(pipeline: Pipeline) -> None:
    for _ in range(25):
        begun(pipeline, 1)
    later(pipeline, timedelta(hours=2))
    leftovers.sweep_all(pipeline.resources)
    assert rows(pipeline, UploadPart) == 5
    leftovers.sweep_all(pipeline.resources)
    assert rows(pipeline, UploadPart) == 0


def test_a_key_that_has_run_out_is_forgotten(pipeline: Pipeline) -> None:
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        for hours in (1, 2):
            transaction.add(
                IdempotencyKey(
                    project_id=pipeline.project_id,
                    route=KeyedRoute.FILES,
                    key=f"{hours}",
                    digest=b"x" * 32,
                    reply="{}",
                    created_at=now,
                    expires_at=now + timedelta(hours=hours),
                )
            )
    later(pipeline, timedelta(hours=1))
    leftovers.sweep_all(pipeline.resources)
    assert rows(pipeline, IdempotencyKey) == 1


def test_a_write_that_nobody_will_finish_is_given_up_after_a_day(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pipeline.resources.storage
    writer = storage.writer("files/abandoned")
    writer.write(b"x" * (9 * MIB))
    leftovers.abort_abandoned(pipeline.resources)
    writer.write(b"x" * (9 * MIB))  # still there
    monkeypatch.setattr(leftovers, "ABANDONED_AFTER", timedelta(seconds=-60))
    leftovers.abort_abandoned(pipeline.resources)
    with pytest.raises(StorageError):
        writer.finish()
    with pytest.raises(MissingObject):
        storage.size("files/abandoned")
    leftovers.abort_abandoned(pipeline.resources)
