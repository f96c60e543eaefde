"""How does a client put files up, list, read and delete them?"""

from collections.abc import Generator
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Literal
from urllib.parse import quote

import structlog
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from service import ids, view
from service.api import ranges
from service.api.auth import Caller, Reader, Submitter
from service.api.content import ContentResponse
from service.api.deps import Needs, Parts
from service.api.errors import documented
from service.api.idempotency import DigestingSink, Key, Once, digest
from service.api.paging import cursor
from service.api.receive import Upload, receive
from service.api.storing import stored, withdraw
from service.db import batches, files, removals
from service.db.models import File
from service.db.session import now
from service.db.upload_models import KeyedRoute
from service.errors import BadRequest, NotFound
from service.storage import MissingObject, StorageError
from service.wire import FileDeleted, FileList, FileObject, Purpose

MAX_PAGE = 10_000

UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(Purpose)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2592000,
                        },
                    },
                }
            }
        },
    }
}

_log = structlog.get_logger(__name__)
router = APIRouter(prefix="/v1/files", tags=["Files"])


@router.post(
    "",
    response_model=FileObject,
    responses=documented(400, 409, 413),
    openapi_extra=UPLOAD_FORM,
)
async def create_file(
    request: Request, caller: Submitter, parts: Needs, key: Key
) -> FileObject | Response:
    """Upload a file. It can be read as soon as this answers."""
    created_at = await run_sync(_now, parts)
    file_id = ids.new_id()
    storage_key = files.storage_key(caller.project_id, file_id)
    forget = partial(files.forget, file_id=file_id)
    async with stored(parts, storage_key, forget) as writer:
        sink = DigestingSink(writer, hashing=key is not None)
        upload = await receive(
            request, sink, max_bytes=parts.settings.max_file_bytes, writers=parts.writers
        )
        await run_sync(writer.finish, limiter=parts.writers)
        file = files.new(
            caller.project_id,
            file_id,
            purpose=upload.purpose,
            filename=upload.filename,
            size=upload.size,
            created_at=created_at,
            expires_after_s=upload.expires_after_s,
            batch_days=parts.settings.file_days,
        )
        once = Once(
            caller.project_id,
            KeyedRoute.FILES,
            key,
            _content(upload, sink),
            timedelta(hours=parts.settings.idempotency_hours),
        )
        reply = await run_sync(_record, parts, file, once)
        if isinstance(reply, Response):
            await run_sync(withdraw, parts, writer, storage_key, forget, limiter=parts.writers)
    return reply


@router.get("", responses=documented(400))
def list_files(
    caller: Reader,
    parts: Needs,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> FileList:
    """The project's files, a page at a time."""
    with parts.database.transaction() as session:
        known = partial(files.was_ever, session, caller.project_id)
        behind = cursor(after, ids.Prefix.FILE, known, what="file")
        rows = files.page(
            session,
            caller.project_id,
            purpose=_searchable(purpose),
            after=behind,
            limit=limit + 1,
            newest_first=order == "desc",
            at=now(session),
        )
    return view.file_list(rows, limit=limit)


@router.get("/{file_id}", responses=documented(404))
def retrieve_file(file_id: str, caller: Reader, parts: Needs) -> FileObject:
    """One file."""
    return view.file_object(_find(parts, caller, file_id))


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file's bytes."},
        206: {"content": {"application/octet-stream": {}}, "description": "The range asked for."},
        **documented(404, 416),
    },
)
async def retrieve_content(
    file_id: str,
    caller: Reader,
    parts: Needs,
    range_: Annotated[str | None, Header(alias="range")] = None,
    if_range: Annotated[str | None, Header()] = None,
) -> Response:
    """The file's bytes, streamed."""
    file = await run_sync(_find, parts, caller, file_id)
    etag = f'"{file.id.hex}"'
    span = ranges.wanted(range_, file.bytes) if if_range in (None, etag) else None
    headers = {
        "accept-ranges": "bytes",
        "content-disposition": _disposition(file.filename),
        "content-length": str(file.bytes if span is None else span.length),
        "etag": etag,
        "x-content-type-options": "nosniff",
    }
    if span is not None:
        headers["content-range"] = span.content_range(file.bytes)
    first, rest = await run_sync(_opened, parts, file, span, limiter=parts.readers)
    return ContentResponse(
        first,
        rest,
        parts.readers,
        status_code=200 if span is None else 206,
        headers=headers,
        media_type="application/octet-stream",
    )


@router.delete("/{file_id}", responses=documented(404))
async def delete_file(file_id: str, caller: Submitter, parts: Needs) -> FileDeleted:
    """Take a file away. An unfinished batch that reads it keeps its bytes until it has ended."""
    file, in_use = await run_sync(_mark_deleted, parts, caller, file_id)
    if not in_use:
        await run_sync(_remove_bytes, parts, file, limiter=parts.writers)
    return FileDeleted(id=file_id, object="file", deleted=True)


def _mark_deleted(parts: Parts, caller: Caller, file_id: str) -> tuple[File, bool]:
    """The file, and whether its bytes are still read by a batch."""
    parsed = ids.parse(ids.Prefix.FILE, file_id)
    if parsed is None:
        raise _unknown(file_id)
    with parts.database.transaction() as session:
        file = files.mark_deleted(session, caller.project_id, parsed, now(session))
        if file is None:
            raise _unknown(file_id)
        return file, batches.reads_file(session, file.id)


def _remove_bytes(parts: Parts, file: File) -> None:
    try:
        with removals.allowed(parts.database.engine) as may:
            if may:
                parts.storage.delete([file.storage_key])
    except (StorageError, SQLAlchemyError) as error:
        # For the client the file is gone; what is left costs room until it is swept.
        _log.warning(
            "bytes of a deleted file left",
            file=ids.show(ids.Prefix.FILE, file.id),
            reason=str(error),
        )


def _now(parts: Parts) -> datetime:
    with parts.database.transaction() as session:
        return now(session)


def _content(upload: Upload, sink: DigestingSink) -> bytes:
    return digest(
        {
            "filename": upload.filename,
            "purpose": upload.purpose,
            "expires_after_s": upload.expires_after_s,
            "sha256": sink.hexdigest(),
        }
    )


def _record(parts: Parts, file: File, once: Once) -> FileObject | Response:
    """The new file; or, of a call made before, its answer, and then nothing is recorded."""
    with parts.database.transaction() as session:
        at = now(session)
        answered = once.replay(session, at)
        if answered is not None:
            return answered
        shown = view.file_object(files.add(session, file))
        once.keep(session, shown, at)
        return shown


def _find(parts: Parts, caller: Caller, file_id: str) -> File:
    parsed = ids.parse(ids.Prefix.FILE, file_id)
    if parsed is not None:
        with parts.database.transaction() as session:
            file = files.find(session, caller.project_id, parsed, now(session))
        if file is not None:
            return file
    raise _unknown(file_id)


def _opened(parts: Parts, file: File, span: ranges.Span | None) -> tuple[bytes, Generator[bytes]]:
    """The first piece and the rest: a store that fails by now is still a clean error."""
    start, length = (0, file.bytes) if span is None else (span.start, span.length)
    pieces = parts.storage.stream(file.storage_key, start, length)
    try:
        first = next(pieces, b"")
    except MissingObject as error:
        raise NotFound("The content of this file is no longer there.", param="id") from error
    return first, pieces


def _searchable(purpose: str | None) -> str | None:
    if purpose is not None and "\0" in purpose:
        raise BadRequest(
            "Invalid value for 'purpose': it holds U+0000.", param="purpose", code="invalid_value"
        )
    return purpose


def _disposition(filename: str) -> str:
    """RFC 6266: a plain name for old readers, the exact one for the others."""
    plain = "".join(
        c if c.isascii() and c.isprintable() and c not in '"\\%' else "_" for c in filename
    )
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


def _unknown(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:64]}", param="id")
