"""How does a client create, follow, list, steer and remove batches?"""

from datetime import timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from service import ids, view
from service.api.auth import Caller, Reader, ReadingVisitor, Submitter
from service.api.body import read_json
from service.api.deps import Needs, Parts
from service.api.errors import documented
from service.api.idempotency import Key, Once, digest
from service.api.paging import cursor, unknown_after
from service.batch import LineState
from service.catalog import Catalog, endpoints_of
from service.db import batches, files, lines
from service.db.models import Batch
from service.db.session import now
from service.db.upload_models import KeyedRoute
from service.errors import BadRequest, NotFound
from service.wire import (
    BatchDeleted,
    BatchList,
    BatchObject,
    CreateBatch,
    LineList,
    Purpose,
    window,
)

MAX_PAGE = 100
MAX_LINES = 1_000

CREATE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CreateBatch"}}},
    }
}

router = APIRouter(prefix="/v1/batches", tags=["Batches"])


async def _posted(request: Request, _caller: Submitter, parts: Needs) -> CreateBatch:
    return await read_json(request, CreateBatch, max_bytes=parts.settings.max_body_bytes)


Posted = Annotated[CreateBatch, Depends(_posted)]


@router.post(
    "",
    response_model=BatchObject,
    responses=documented(400, 409, 413),
    openapi_extra=CREATE_BODY,
)
def create_batch(
    posted: Posted, caller: Submitter, parts: Needs, key: Key
) -> BatchObject | Response:
    """Submit an uploaded file. Its lines are checked next, then run within the window."""
    _check_endpoint(parts.catalog, posted.endpoint)
    file_id = ids.parse(ids.Prefix.FILE, posted.input_file_id)
    expires = posted.output_expires_after
    once = Once(
        caller.project_id,
        KeyedRoute.BATCHES,
        key,
        digest(posted.model_dump(mode="json")),
        timedelta(hours=parts.settings.idempotency_hours),
    )
    with parts.database.transaction() as session:
        at = now(session)
        answered = once.replay(session, at)
        if answered is not None:
            return answered
        file = None if file_id is None else files.hold(session, caller.project_id, file_id, at)
        if file is None:
            raise _bad_input(f"no such File object: {posted.input_file_id[:64]}")
        if file.purpose != Purpose.BATCH:
            raise _bad_input(f"its purpose is '{file.purpose}', and 'batch' is needed")
        batch = batches.create(
            session,
            project_id=caller.project_id,
            endpoint=posted.endpoint,
            input_file_id=file.id,
            completion_window=posted.completion_window,
            window=window(posted.completion_window),
            metadata=posted.metadata,
            output_expires_after_s=None if expires is None else expires.seconds,
            now=at,
        )
        shown = view.batch_object(batch)
        once.keep(session, shown, at)
    parts.waker.validate()
    return shown


@router.get("", responses=documented(400))
def list_batches(
    caller: Reader,
    parts: Needs,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: str | None = None,
) -> BatchList:
    """The project's batches, newest first, a page at a time."""
    with parts.database.transaction() as session:

        def known(batch_id: UUID) -> bool:
            return batches.was_ever(session, caller.project_id, batch_id)

        behind = cursor(after, ids.Prefix.BATCH, known, what="batch")
        rows = batches.page(session, caller.project_id, after=behind, limit=limit + 1)
        return view.batch_list(rows, limit=limit)


@router.get("/{batch_id}", responses=documented(404))
def retrieve_batch(batch_id: str, visitor: ReadingVisitor, parts: Needs) -> BatchObject:
    """One batch."""
    # What clients poll: one thread, one connection, one statement.
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.reading() as session:
        if parsed is None:
            visitor.admit(session)
            raise _unknown(batch_id)
        _, batch = visitor.admit_beside(session, Batch, batches.of_key(parsed))
    return view.batch_object(_known(batch, batch_id))


@router.post("/{batch_id}/cancel", responses=documented(404, 409))
def cancel_batch(batch_id: str, caller: Submitter, parts: Needs) -> BatchObject:
    """End a batch early. What has finished by then is in its output file."""
    shown = _cancelled(parts, caller, batch_id)
    parts.waker.assemble()
    return shown


def _cancelled(parts: Parts, caller: Caller, batch_id: str) -> BatchObject:
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        batch = None
        if parsed is not None:
            batch = batches.cancel(session, caller.project_id, parsed, now(session))
        return view.batch_object(_known(batch, batch_id))


@router.post("/{batch_id}/retry", responses=documented(404, 409))
def retry_batch(batch_id: str, caller: Submitter, parts: Needs) -> BatchObject:
    """Run what an ended batch left without a success again, as a new batch with a window of its
    own. Asked again, the same batch is answered."""
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        made = None
        if parsed is not None:
            made = batches.retry(session, caller.project_id, parsed, now(session))
        shown = view.batch_object(_known(made, batch_id))
    parts.waker.validate()
    return shown


@router.post("/{batch_id}/pause", responses=documented(404, 409))
def pause_batch(batch_id: str, caller: Submitter, parts: Needs) -> BatchObject:
    """Run no more lines of a batch for now. Its window runs on."""
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        batch = None
        if parsed is not None:
            batch = batches.pause(session, caller.project_id, parsed, now(session))
        return view.batch_object(_known(batch, batch_id))


@router.post("/{batch_id}/resume", responses=documented(404, 409))
def resume_batch(batch_id: str, caller: Submitter, parts: Needs) -> BatchObject:
    """Run a paused batch again."""
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        batch = None
        if parsed is not None:
            batch = batches.resume(session, caller.project_id, parsed)
        shown = view.batch_object(_known(batch, batch_id))
    if shown.model is not None:  # where lines name several, the next tick wakes the workers
        parts.waker.drain(shown.model)
    return shown


@router.delete("/{batch_id}", responses=documented(404, 409))
def delete_batch(batch_id: str, caller: Submitter, parts: Needs) -> BatchDeleted:
    """Remove an ended batch, its lines and its result files. The input file stays."""
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        known = parsed is not None and batches.delete(
            session, caller.project_id, parsed, now(session)
        )
    if not known:
        raise _unknown(batch_id)
    parts.waker.remove()
    return BatchDeleted(id=batch_id, object="batch", deleted=True)


@router.get("/{batch_id}/lines", responses=documented(400, 404))
def list_lines(
    batch_id: str,
    caller: Reader,
    parts: Needs,
    status: LineState | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES)] = 100,
    after: str | None = None,
) -> LineList:
    """The batch's lines in input order, a page at a time; of one status, where it is given."""
    parsed = ids.parse(ids.Prefix.BATCH, batch_id)
    with parts.database.transaction() as session:
        batch = None if parsed is None else batches.get(session, caller.project_id, parsed)
        found = _known(batch, batch_id)
        behind = 0
        if after is not None:
            number = ids.parse_line(after)
            if number is None or not lines.is_there(session, found.id, number):
                raise unknown_after(after, what="line")
            behind = number
        rows = lines.page(session, found.id, state=status, after=behind, limit=limit + 1)
        return view.line_list(rows, limit=limit)


def _check_endpoint(catalog: Catalog, endpoint: str) -> None:
    served = {name for model in catalog.models for name in endpoints_of(model)}
    if endpoint not in served:
        raise BadRequest(
            f"Invalid value for 'endpoint': '{endpoint[:64]}'. Served here: "
            f"{', '.join(sorted(served)) or 'none'}.",
            param="endpoint",
            code="invalid_value",
        )


def _bad_input(reason: str) -> BadRequest:
    return BadRequest(
        f"Invalid value for 'input_file_id': {reason}.",
        param="input_file_id",
        code="invalid_value",
    )


def _known(batch: Batch | None, batch_id: str) -> Batch:
    if batch is None:
        raise _unknown(batch_id)
    return batch


def _unknown(batch_id: str) -> NotFound:
    return NotFound(f"No such Batch object: {batch_id[:64]}", param="id")
