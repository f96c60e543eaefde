"""How do the parts of an upload become one file? Streamed through, once, whoever asks how often.

Nothing is claimed meanwhile: several calls may join the same parts, each into an object of its own,
and the transaction that ends the upload decides whose is the file. The others take theirs back and
give the same answer. A call that dies leaves the upload as it was.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never
from uuid import UUID

from sqlalchemy.orm import Session

from service import ids, view
from service.api.deps import Parts
from service.api.storing import withdraw
from service.db import files, uploads
from service.db.models import File
from service.db.session import now
from service.db.upload_models import Upload
from service.errors import BadRequest, Conflict, NotFound
from service.storage import MissingObject, ObjectWriter, StorageError
from service.upload import UploadStatus
from service.wire import CompleteUpload, UploadObject

PART_IDS = "part_ids"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The parts of a pending upload that are to become its file, in order."""

    upload: Upload
    part_ids: Sequence[UUID]


class Overtaken(Exception):
    """Somebody else has ended the upload meanwhile."""


def complete(
    parts: Parts, project_id: UUID, upload_id: UUID, posted: CompleteUpload
) -> UploadObject:
    """Join the parts, unless that is done. Raises BadRequest, Conflict and NotFound."""
    part_ids = _parsed(posted.part_ids)
    with parts.database.transaction() as session:
        upload = _known(uploads.find(session, project_id, upload_id), upload_id)
        done = _ended(session, upload, part_ids, now(session))
        if done is not None:
            return done
        chosen = _chosen(upload, part_ids, uploads.part_sizes(session, upload_id))
    try:
        return _join(parts, chosen, posted.md5)
    except (Overtaken, MissingObject):
        # Whoever ended it may have had the parts removed already.
        with parts.database.transaction() as session:
            upload = _known(uploads.find(session, project_id, upload_id), upload_id)
            done = _ended(session, upload, part_ids, now(session))
        if done is None:
            raise
        return done


def unknown(upload_id: str) -> NotFound:
    """The answer where there is no such upload."""
    return NotFound(f"No such Upload object: {upload_id[:64]}", param="id")


def _known(upload: Upload | None, upload_id: UUID) -> Upload:
    if upload is None:
        raise unknown(ids.show(ids.Prefix.UPLOAD, upload_id))
    return upload


def _parsed(texts: Sequence[str]) -> list[UUID]:
    found: list[UUID] = []
    for text in texts:
        part_id = ids.parse(ids.Prefix.PART, text)
        if part_id is None:
            raise _no_part(text)
        found.append(part_id)
    if len(set(found)) < len(found):
        raise _invalid(PART_IDS, "a part is named twice")
    return found


def _ended(
    session: Session, upload: Upload, part_ids: Sequence[UUID], at: datetime
) -> UploadObject | None:
    """What an upload that has ended answers; None while it is pending."""
    status = uploads.status_at(upload, at)
    match status:
        case UploadStatus.PENDING:
            return None
        case UploadStatus.COMPLETED:
            if upload.part_ids != list(part_ids):
                raise Conflict("This upload is completed already, with other parts.")
            file = None if upload.file_id is None else session.get(File, upload.file_id)
            return view.upload_object(upload, status=status, file=file)
        case UploadStatus.CANCELLED | UploadStatus.EXPIRED:
            raise Conflict(f"Cannot complete an upload with status '{status}'.")
        case _:
            assert_never(status)


def _chosen(upload: Upload, part_ids: Sequence[UUID], sizes: dict[UUID, int]) -> Chosen:
    for part_id in part_ids:
        if part_id not in sizes:
            raise _no_part(ids.show(ids.Prefix.PART, part_id))
    total = sum(sizes[part_id] for part_id in part_ids)
    if total != upload.bytes:
        raise _invalid(
            PART_IDS, f"the parts have {total} bytes, and the upload was to have {upload.bytes}"
        )
    return Chosen(upload, part_ids)


def _join(parts: Parts, chosen: Chosen, md5: str | None) -> UploadObject:
    upload, file_id = chosen.upload, ids.new_id()
    key = files.storage_key(upload.project_id, file_id)
    writer = parts.storage.writer(key)
    try:
        _stream(parts, chosen, writer, md5)
        writer.finish()
        return _record(parts, chosen, file_id)
    except BaseException:
        withdraw(parts, writer, key, lambda session: files.forget(session, file_id))
        raise


def _stream(parts: Parts, chosen: Chosen, writer: ObjectWriter, md5: str | None) -> None:
    """One part after the other. Raises Overtaken as soon as there is nothing left to join for."""
    upload = chosen.upload
    # The checksum is the client's choice and guards against accidents, not against anybody.
    seen = hashlib.md5(usedforsecurity=False)
    for part_id in chosen.part_ids:
        with parts.database.transaction() as session:
            if not uploads.is_pending(session, upload.id):
                raise Overtaken
        part_key = uploads.part_key(upload.project_id, upload.id, part_id)
        for piece in parts.storage.stream(part_key):
            if md5 is not None:
                seen.update(piece)
            writer.write(piece)
    if writer.size != upload.bytes:
        raise StorageError(f"the parts of {upload.id.hex} have {writer.size} bytes in the store")
    if md5 is not None and seen.hexdigest() != md5.lower():
        raise _invalid("md5", f"the parts joined have the md5 {seen.hexdigest()}")


def _record(parts: Parts, chosen: Chosen, file_id: UUID) -> UploadObject:
    with parts.database.transaction() as session:
        at = now(session)
        held = uploads.hold(session, chosen.upload.project_id, chosen.upload.id)
        if held is None or held.status is not UploadStatus.PENDING:
            raise Overtaken
        file = files.add(
            session,
            files.new(
                held.project_id,
                file_id,
                purpose=held.purpose,
                filename=held.filename,
                size=held.bytes,
                created_at=at,
                expires_after_s=held.expires_after_s,
                batch_days=parts.settings.file_days,
            ),
        )
        uploads.complete(session, held, file_id, chosen.part_ids, at)
        return view.upload_object(held, status=held.status, file=file)


def _no_part(shown: str) -> BadRequest:
    return _invalid(PART_IDS, f"no part '{shown[:64]}' of this upload")


def _invalid(param: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
