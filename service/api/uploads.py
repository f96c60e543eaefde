"""How does a client put up a large file in parts?"""

from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, assert_never
from uuid import UUID

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request, Response
from sqlalchemy.orm import Session

from service import ids, view
from service.api import join
from service.api.auth import Caller, Submitter
from service.api.body import read_json
from service.api.deps import Needs, Parts
from service.api.errors import documented
from service.api.idempotency import Key, Once, digest
from service.api.naming import check_ending, check_name
from service.api.receive import DATA, receive_part
from service.api.storing import stored
from service.db import uploads
from service.db.session import now
from service.db.upload_models import KeyedRoute, Upload
from service.errors import BadRequest, Conflict, TooLarge
from service.upload import UploadStatus
from service.wire import MAX_PARTS, CompleteUpload, CreateUpload, UploadObject, UploadPartObject


def _json_body(name: str) -> dict[str, object]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


PART_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [DATA],
                    "properties": {DATA: {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}

router = APIRouter(prefix="/v1/uploads", tags=["Uploads"])


async def _posted(request: Request, _caller: Submitter, parts: Needs) -> CreateUpload:
    return await read_json(request, CreateUpload, max_bytes=parts.settings.max_body_bytes)


Posted = Annotated[CreateUpload, Depends(_posted)]


@router.post(
    "",
    response_model=UploadObject,
    responses=documented(400, 409, 413),
    openapi_extra=_json_body("CreateUpload"),
)
def create_upload(
    posted: Posted, caller: Submitter, parts: Needs, key: Key
) -> UploadObject | Response:
    """Begin an upload. Its parts are sent next, and joined when it is completed."""
    settings = parts.settings
    check_name(posted.filename, param="filename")
    check_ending(posted.filename, posted.purpose, param="filename")
    if posted.bytes > settings.max_upload_bytes:
        raise TooLarge(
            f"The upload is larger than the limit of {settings.max_upload_bytes} bytes.",
            param="bytes",
        )
    once = Once(
        caller.project_id,
        KeyedRoute.UPLOADS,
        key,
        digest(posted.model_dump(mode="json")),
        timedelta(hours=settings.idempotency_hours),
    )
    with parts.database.transaction() as session:
        at = now(session)
        answered = once.replay(session, at)
        if answered is not None:
            return answered
        expires = posted.expires_after
        upload = uploads.add(
            session,
            Upload(
                id=ids.new_id(),
                project_id=caller.project_id,
                purpose=posted.purpose,
                filename=posted.filename,
                mime_type=posted.mime_type,
                bytes=posted.bytes,
                expires_after_s=None if expires is None else expires.seconds,
                created_at=at,
                expires_at=at + timedelta(hours=settings.upload_hours),
            ),
        )
        shown = view.upload_object(upload, status=upload.status)
        once.keep(session, shown, at)
    return shown


@router.post(
    "/{upload_id}/parts", responses=documented(400, 404, 409, 413), openapi_extra=PART_FORM
)
async def create_part(
    upload_id: str, request: Request, caller: Submitter, parts: Needs
) -> UploadPartObject:
    """Add a part; any number of them may be sent at once."""
    upload = await run_sync(_open, parts, caller, upload_id)
    part_id = ids.new_id()
    part_key = uploads.part_key(caller.project_id, upload.id, part_id)
    async with stored(parts, part_key, partial(uploads.forget_part, part_id=part_id)) as writer:
        size = await receive_part(
            request, writer, max_bytes=parts.settings.max_part_bytes, writers=parts.writers
        )
        await run_sync(writer.finish, limiter=parts.writers)
        return await run_sync(_record, parts, caller, upload_id, part_id, size)


@router.post(
    "/{upload_id}/complete",
    responses=documented(400, 404, 409, 413),
    openapi_extra=_json_body("CompleteUpload"),
)
async def complete_upload(
    upload_id: str, request: Request, caller: Submitter, parts: Needs
) -> UploadObject:
    """Join the parts, in the order given, into a file. Doing it again gives the same file."""
    # An upload that is not there is 404 whatever the body says.
    upload = await run_sync(_find, parts, caller, upload_id)
    max_bytes = parts.settings.max_body_bytes
    posted = await read_json(request, CompleteUpload, max_bytes=max_bytes)
    # Few at once: each holds a thread for as long as its file takes to be read and written.
    return await run_sync(
        join.complete, parts, caller.project_id, upload.id, posted, limiter=parts.joins
    )


@router.post("/{upload_id}/cancel", responses=documented(404, 409))
def cancel_upload(upload_id: str, caller: Submitter, parts: Needs) -> UploadObject:
    """Give an upload up. Its parts are removed."""
    with parts.database.transaction() as session:
        upload = _held(session, caller.project_id, upload_id)
        at = now(session)
        status = uploads.status_at(upload, at)
        match status:
            case UploadStatus.PENDING:
                uploads.cancel(session, upload, at)
            case UploadStatus.CANCELLED:
                pass
            case UploadStatus.COMPLETED | UploadStatus.EXPIRED:
                raise Conflict(f"Cannot cancel an upload with status '{status}'.")
            case _:
                assert_never(status)
        return view.upload_object(upload, status=upload.status)


def _find(parts: Parts, caller: Caller, upload_id: str) -> Upload:
    parsed = ids.parse(ids.Prefix.UPLOAD, upload_id)
    with parts.database.transaction() as session:
        found = None if parsed is None else uploads.find(session, caller.project_id, parsed)
    if found is None:
        raise join.unknown(upload_id)
    return found


def _held(session: Session, project_id: UUID, upload_id: str) -> Upload:
    parsed = ids.parse(ids.Prefix.UPLOAD, upload_id)
    held = None if parsed is None else uploads.hold(session, project_id, parsed)
    if held is None:
        raise join.unknown(upload_id)
    return held


def _open(parts: Parts, caller: Caller, upload_id: str) -> Upload:
    """An upload that may be added to: known before the part's bytes are read."""
    upload = _find(parts, caller, upload_id)
    with parts.database.transaction() as session:
        _check_pending(upload, now(session))
    return upload


def _record(
    parts: Parts, caller: Caller, upload_id: str, part_id: UUID, size: int
) -> UploadPartObject:
    with parts.database.transaction() as session:
        upload = _held(session, caller.project_id, upload_id)
        at = now(session)
        _check_pending(upload, at)
        _check_room(upload, size, parts.settings.max_part_bytes)
        return view.upload_part_object(uploads.add_part(session, upload, part_id, size, at))


def _check_pending(upload: Upload, at: datetime) -> None:
    status = uploads.status_at(upload, at)
    if status is not UploadStatus.PENDING:
        raise Conflict(f"Cannot add a part to an upload with status '{status}'.")


def _check_room(upload: Upload, size: int, max_part_bytes: int) -> None:
    """Parts may be sent again, but not without end."""
    if upload.received_parts >= MAX_PARTS:
        raise BadRequest(
            f"The upload has {MAX_PARTS} parts, which is the limit.",
            param=DATA,
            code="too_many_parts",
        )
    most = 2 * upload.bytes + max_part_bytes
    if upload.received_bytes + size > most:
        raise TooLarge(
            f"The parts come to more than {most} bytes, the limit for an upload of {upload.bytes}.",
            param=DATA,
        )
