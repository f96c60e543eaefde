"""What shape has every request and reply that goes over HTTP? (`service.view` fills them.)"""

import re
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from service.batch import BatchStatus, LineState
from service.catalog import ModelKind
from service.targets import LONGEST_URL
from service.upload import UploadStatus
from service.webhook import EventType

EXPIRES_AFTER_MIN_S = 3_600
EXPIRES_AFTER_MAX_S = 2_592_000
WINDOW_MAX_H = 168
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_FILENAME = 255
MAX_WEBHOOK_NAME = 255
MAX_PARTS = 10_000
"""Most parts of an upload; their ids fit into one request body."""

_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")


class Purpose(StrEnum):
    """What a file may be uploaded for; only `batch` means anything to this service."""

    ASSISTANTS = "assistants"
    BATCH = "batch"
    FINE_TUNE = "fine-tune"
    VISION = "vision"
    USER_DATA = "user_data"
    EVALS = "evals"


BATCH_OUTPUT = "batch_output"
"""The purpose of the files that batches make."""


class Request(BaseModel):
    """A body that a client sends: nothing in it is passed over in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Reply(BaseModel):
    """A body that the service sends: every key, always."""

    model_config = ConfigDict(frozen=True)


def storable(text: str) -> str:
    """`text`, unless Postgres cannot hold it: no text column and no JSONB takes U+0000."""
    if "\0" in text:
        raise PydanticCustomError("invalid_value", "must not contain the character U+0000")
    return text


def window(text: str) -> timedelta:
    """How long a completion window is. ValueError unless it is "1h" to "168h"."""
    match = _WINDOW.fullmatch(text)
    if match is None or int(match[1]) > WINDOW_MAX_H:
        raise ValueError(f"a window is a whole number of hours from 1h to {WINDOW_MAX_H}h")
    return timedelta(hours=int(match[1]))


def _is_window(text: str) -> str:
    try:
        window(text)
    except ValueError as error:
        raise PydanticCustomError(
            "invalid_value",
            'expected "24h", or any whole number of hours from "1h" to "{most}h"',
            {"most": WINDOW_MAX_H},
        ) from error
    return text


def _once_each(events: list[EventType]) -> list[EventType]:
    return list(dict.fromkeys(events))


def _text(most: int) -> StringConstraints:
    return StringConstraints(strict=True, max_length=most)


MetadataKey = Annotated[str, _text(MAX_METADATA_KEY), AfterValidator(storable)]
MetadataValue = Annotated[str, _text(MAX_METADATA_VALUE), AfterValidator(storable)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA_PAIRS)]


class ExpiresAfter(Request):
    """When a file expires: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=EXPIRES_AFTER_MIN_S, le=EXPIRES_AFTER_MAX_S)]


class CreateBatch(Request):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, AfterValidator(_is_window)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class CreateUpload(Request):
    """POST /v1/uploads."""

    bytes: Annotated[int, Field(ge=1)]
    filename: Annotated[str, StringConstraints(min_length=1, max_length=MAX_FILENAME)]
    mime_type: Annotated[
        str, StringConstraints(min_length=1, max_length=MAX_FILENAME), AfterValidator(storable)
    ]
    purpose: Annotated[Purpose, Field(strict=False)]
    expires_after: ExpiresAfter | None = None


class CompleteUpload(Request):
    """POST /v1/uploads/{upload_id}/complete."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_PARTS)]
    md5: Annotated[str, StringConstraints(pattern="^[0-9A-Fa-f]{32}$")] | None = None


WebhookName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_WEBHOOK_NAME), AfterValidator(storable)
]
WebhookUrl = Annotated[str, StringConstraints(max_length=LONGEST_URL), AfterValidator(storable)]
EventTypes = Annotated[
    list[Annotated[EventType, Field(strict=False)]], Field(min_length=1), AfterValidator(_once_each)
]


class CreateWebhookEndpoint(Request):
    """POST /v1/webhook_endpoints."""

    name: WebhookName
    url: WebhookUrl
    event_types: EventTypes


class UpdateWebhookEndpoint(Request):
    """POST /v1/webhook_endpoints/{webhook_endpoint_id}: what is left out stays as it is."""

    name: WebhookName | None = None
    url: WebhookUrl | None = None
    event_types: EventTypes | None = None


class RotateSecret(Request):
    """POST /v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret."""

    keep_old_secret_active_for_24_hours: bool = False


class SampleEvent(Request):
    """POST /v1/webhook_endpoints/{webhook_endpoint_id}/test."""

    event_type: Annotated[EventType, Field(strict=False)]


class FileObject(Reply):
    """A file, as the reference shows it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class UploadObject(Reply):
    """An upload, as the reference shows it; `file` is there once it is completed."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: UploadStatus
    file: FileObject | None


class UploadPartObject(Reply):
    """A part of an upload, as the reference shows it."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class FileDeleted(Reply):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(Reply):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(Reply):
    """What was wrong with one line of an input file, or with all of it (`line` null)."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Reply):
    """Why a batch failed: the first of its errors; `halfrate.error_count` is their number."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Reply):
    """Lines of a batch: all, those in the output file, those answered by an error."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(Reply):
    """Of the input tokens, those that were computed once for several lines."""

    cached_tokens: int


class OutputTokensDetails(Reply):
    """Of the output tokens, those spent on reasoning."""

    reasoning_tokens: int


class BatchUsage(Reply):
    """The tokens of an ended batch."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Cost(Reply):
    """What the lines so far cost, in exact decimals."""

    currency: Literal["USD"]
    standard: str
    paid: str
    saved: str


class EngineWork(Reply):
    """What the lines that succeeded so far cost the engine.

    `computed_tokens` went through the model, `padding` of them (0 to 1) for no line's sake; lines
    that repeat another's text compute nothing. `seconds` are the lines' shares of its time. Of a
    line's share, median and 95th percentile are known once the batch has ended. `ttft_ms` is the
    mean time of an answer from when its prompt was begun to its first token, `tpot_ms` that of each
    token after it; null where nothing is made token by token.
    """

    tokens: int
    computed_tokens: int
    padding: float
    seconds: float
    tokens_per_second: float | None
    rows_per_step: float | None
    p50_ms: float | None
    p95_ms: float | None
    cached_tokens: int
    preempted: int
    ttft_ms: float | None
    tpot_ms: float | None


class BatchExtras(Reply):
    """What this service says of a batch beyond the reference; `engine` once a line succeeded."""

    error_count: int
    cost: Cost
    paused: bool
    retry_of: str | None
    retried_by: str | None
    engine: EngineWork | None


class BatchObject(Reply):
    """A batch, as the reference shows it, and `halfrate`."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    halfrate: BatchExtras


class BatchList(Reply):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchDeleted(Reply):
    """A batch that is gone."""

    id: str
    object: Literal["batch"]
    deleted: Literal[True]


class LineObject(Reply):
    """A line of a batch: where it stands, how often it was tried, and what went wrong last."""

    id: str
    object: Literal["batch.line"]
    line: int
    custom_id: str
    status: LineState
    attempts: int
    next_try_at: int | None
    status_code: int | None
    error_code: str | None


class LineList(Reply):
    """A page of lines."""

    object: Literal["list"]
    data: list[LineObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookEndpointObject(Reply):
    """A webhook endpoint, as the reference shows it."""

    id: str
    object: Literal["webhook_endpoint"]
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str


class WebhookEndpointWithSecret(WebhookEndpointObject):
    """A webhook endpoint whose secret is shown, this once."""

    signing_secret: str = Field(repr=False)


class WebhookEndpointList(Reply):
    """A page of webhook endpoints."""

    object: Literal["list"]
    data: list[WebhookEndpointObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class WebhookEndpointDeleted(Reply):
    """A webhook endpoint that is gone."""

    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: Literal[True]


class WebhookEndpointTest(Reply):
    """What an endpoint answered to a sample event."""

    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: EventType
    status_code: int
    success: Literal[True]


class WebhookEventTypeList(Reply):
    """What endpoints can be told of."""

    object: Literal["list"]
    data: list[EventType]


class Price(Reply):
    """What a million tokens cost before the discount, and the part taken off in a batch."""

    currency: Literal["USD"]
    input: str
    output: str
    batch_discount: str


class ModelExtras(Reply):
    """What this service says of a model beyond the reference."""

    kind: ModelKind
    endpoints: list[str]
    context_length: int | None
    price: Price


class ModelObject(Reply):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["halfrate"]
    halfrate: ModelExtras


class ModelList(Reply):
    """All served models."""

    object: Literal["list"]
    data: list[ModelObject]


class ErrorBody(Reply):
    """What went wrong, for a person (`message`) and for a program."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """The body of every answer that is not a success."""

    error: ErrorBody
