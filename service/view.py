"""How does a row become what clients see? Pure functions from rows to the shapes of `wire`."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from service import catalog, ids
from service.batch import RUNNING, TERMINAL, BatchStatus
from service.db.models import Batch, File, RequestLine
from service.db.upload_models import Upload, UploadPart
from service.db.webhook_models import WebhookEndpoint
from service.upload import UploadStatus
from service.wire import (
    BatchError,
    BatchErrors,
    BatchExtras,
    BatchList,
    BatchObject,
    BatchUsage,
    Cost,
    EngineWork,
    FileList,
    FileObject,
    InputTokensDetails,
    LineList,
    LineObject,
    ModelExtras,
    ModelObject,
    OutputTokensDetails,
    Price,
    RequestCounts,
    UploadObject,
    UploadPartObject,
    WebhookEndpointList,
    WebhookEndpointObject,
    WebhookEndpointWithSecret,
)

ERRORS_SHOWN = 1_000
ERRORS_SHOWN_IN_LISTS = 100


def file_object(file: File) -> FileObject:
    """A row as clients see it."""
    return FileObject(
        id=ids.show(ids.Prefix.FILE, file.id),
        object="file",
        bytes=file.bytes,
        created_at=_seconds(file.created_at),
        expires_at=_maybe_seconds(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        status_details=None,
    )


def file_list(files: Sequence[File], *, limit: int) -> FileList:
    """A page, made of up to `limit` + 1 rows: the one too many says that there is more."""
    data = [file_object(file) for file in files[:limit]]
    return FileList(
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(files) > limit,
    )


def upload_object(
    upload: Upload, *, status: UploadStatus, file: File | None = None
) -> UploadObject:
    """A row as clients see it. `status` is the one of the moment, which the clock may have changed;
    `file` what a completed one has become."""
    return UploadObject(
        id=ids.show(ids.Prefix.UPLOAD, upload.id),
        object="upload",
        bytes=upload.bytes,
        created_at=_seconds(upload.created_at),
        expires_at=_seconds(upload.expires_at),
        filename=upload.filename,
        purpose=upload.purpose,
        status=status,
        file=None if file is None else file_object(file),
    )


def upload_part_object(part: UploadPart) -> UploadPartObject:
    """A row as clients see it."""
    return UploadPartObject(
        id=ids.show(ids.Prefix.PART, part.id),
        object="upload.part",
        created_at=_seconds(part.created_at),
        upload_id=ids.show(ids.Prefix.UPLOAD, part.upload_id),
    )


def batch_object(batch: Batch, *, errors_shown: int = ERRORS_SHOWN) -> BatchObject:
    """A row as clients see it."""
    return BatchObject(
        id=ids.show(ids.Prefix.BATCH, batch.id),
        object="batch",
        endpoint=batch.endpoint,
        model=batch.model,
        errors=_errors(batch, errors_shown),
        input_file_id=ids.show(ids.Prefix.FILE, batch.input_file_id),
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=_maybe_file(batch.output_file_id),
        error_file_id=_maybe_file(batch.error_file_id),
        created_at=_seconds(batch.created_at),
        in_progress_at=_maybe_seconds(batch.in_progress_at),
        expires_at=_seconds(batch.expires_at),
        finalizing_at=_maybe_seconds(batch.finalizing_at),
        completed_at=_maybe_seconds(batch.completed_at),
        failed_at=_maybe_seconds(batch.failed_at),
        expired_at=_maybe_seconds(batch.expired_at),
        cancelling_at=_maybe_seconds(batch.cancelling_at),
        cancelled_at=_maybe_seconds(batch.cancelled_at),
        request_counts=_counts(batch),
        usage=_usage(batch),
        metadata=batch.metadata_,
        halfrate=BatchExtras(
            error_count=batch.error_count,
            cost=_cost(batch),
            paused=batch.paused_at is not None and batch.status in RUNNING,
            retry_of=_maybe_batch(batch.retry_of),
            retried_by=_maybe_batch(batch.retried_by),
            engine=_engine(batch),
        ),
    )


def batch_list(batches: Sequence[Batch], *, limit: int) -> BatchList:
    """A page, made of up to `limit` + 1 rows: the one too many says that there is more."""
    data = [batch_object(batch, errors_shown=ERRORS_SHOWN_IN_LISTS) for batch in batches[:limit]]
    return BatchList(
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(batches) > limit,
    )


def line_object(row: RequestLine) -> LineObject:
    """A row as clients see it."""
    return LineObject(
        id=ids.show_line(row.line),
        object="batch.line",
        line=row.line,
        custom_id=row.custom_id,
        status=row.state,
        attempts=row.attempts,
        next_try_at=_maybe_seconds(row.next_try_at),
        status_code=row.status_code,
        error_code=row.error_code,
    )


def line_list(rows: Sequence[RequestLine], *, limit: int) -> LineList:
    """A page, made of up to `limit` + 1 rows: the one too many says that there is more."""
    data = [line_object(row) for row in rows[:limit]]
    return LineList(
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(rows) > limit,
    )


def model_object(model: catalog.Model) -> ModelObject:
    """A model of the catalog as clients see it."""
    return ModelObject(
        id=model.id,
        object="model",
        created=0,  # the catalog says what is served, not since when
        owned_by="halfrate",
        halfrate=ModelExtras(
            kind=model.kind,
            endpoints=sorted(catalog.endpoints_of(model)),
            context_length=model.context_length,
            price=Price(
                currency="USD",
                input=plain(model.price_input),
                output=plain(model.price_output),
                batch_discount=plain(model.discount),
            ),
        ),
    )


def webhook_endpoint(endpoint: WebhookEndpoint) -> WebhookEndpointObject:
    """A row as clients see it."""
    return WebhookEndpointObject(
        id=ids.show(ids.Prefix.WEBHOOK_ENDPOINT, endpoint.id),
        object="webhook_endpoint",
        created_at=_seconds(endpoint.created_at),
        updated_at=_seconds(endpoint.updated_at),
        name=endpoint.name,
        url=endpoint.url,
        event_types=endpoint.event_types,
        signing_secret_hint=endpoint.secret_hint,
    )


def webhook_endpoint_with_secret(
    endpoint: WebhookEndpoint, secret: str
) -> WebhookEndpointWithSecret:
    """A row as clients see it when its secret was made."""
    shown = webhook_endpoint(endpoint)
    return WebhookEndpointWithSecret(**shown.model_dump(), signing_secret=secret)


def webhook_endpoint_list(
    endpoints: Sequence[WebhookEndpoint], *, limit: int
) -> WebhookEndpointList:
    """A page, made of up to `limit` + 1 rows: the one too many says that there is more."""
    data = [webhook_endpoint(each) for each in endpoints[:limit]]
    return WebhookEndpointList(
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(endpoints) > limit,
    )


def plain(amount: Decimal) -> str:
    """An exact decimal without exponent or trailing zeros: `0.00000123`, `100`, `0`."""
    if amount == 0:
        return "0"
    digits = f"{amount:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _errors(batch: Batch, shown: int) -> BatchErrors | None:
    if batch.errors is None:
        return None
    return BatchErrors(
        object="list",
        data=[
            BatchError(
                code=error["code"],
                message=error["message"],
                param=error.get("param"),
                line=error.get("line"),
            )
            for error in batch.errors[:shown]
        ],
    )


def _counts(batch: Batch) -> RequestCounts:
    """0/0/0 until the input was accepted, and for ever where it never was."""
    if batch.in_progress_at is None:
        return RequestCounts(total=0, completed=0, failed=0)
    return RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed)


def _usage(batch: Batch) -> BatchUsage | None:
    """Null until the batch has ended, and of a failed one, which never ran."""
    if batch.status not in TERMINAL or batch.status is BatchStatus.FAILED:
        return None
    return BatchUsage(
        input_tokens=batch.input_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=batch.cached_tokens),
        output_tokens=batch.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=batch.input_tokens + batch.output_tokens,
    )


def _cost(batch: Batch) -> Cost:
    return Cost(
        currency="USD",
        standard=plain(batch.standard_cost),
        paid=plain(batch.paid_cost),
        saved=plain(batch.standard_cost - batch.paid_cost),
    )


def _maybe_batch(value: UUID | None) -> str | None:
    return None if value is None else ids.show(ids.Prefix.BATCH, value)


def _engine(batch: Batch) -> EngineWork | None:
    """Null until a line has succeeded."""
    if not batch.completed:
        return None
    tokens, computed = batch.input_tokens + batch.output_tokens, batch.computed_tokens
    return EngineWork(
        tokens=tokens,
        computed_tokens=computed,
        padding=round(1 - batch.useful_tokens / computed, 4) if computed else 0.0,
        seconds=round(batch.engine_s, 6),
        tokens_per_second=round(tokens / batch.engine_s, 1) if batch.engine_s else None,
        rows_per_step=round(batch.engine_rows / batch.engine_steps, 2)
        if batch.engine_steps
        else None,
        p50_ms=_maybe_rounded(batch.p50_ms),
        p95_ms=_maybe_rounded(batch.p95_ms),
        cached_tokens=batch.cached_tokens,
        preempted=batch.preempted,
        ttft_ms=_mean_ms(batch.first_token_s, batch.engine_rows),
        tpot_ms=_mean_ms(batch.later_tokens_s, batch.later_tokens),
    )


def _mean_ms(seconds: float, count: int) -> float | None:
    return round(seconds * 1000 / count, 3) if seconds and count else None


def _maybe_rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _maybe_file(value: UUID | None) -> str | None:
    return None if value is None else ids.show(ids.Prefix.FILE, value)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())


def _maybe_seconds(at: datetime | None) -> int | None:
    return None if at is None else _seconds(at)
