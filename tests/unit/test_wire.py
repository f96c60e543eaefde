"""Do requests come in, and rows go out, exactly as the contract says?"""

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import openai.types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.api.body import parse
from service.batch import TERMINAL, BatchStatus
from service.catalog import Model, ModelKind
from service.db.models import Batch, File
from service.db.upload_models import Upload, UploadPart
from service.errors import BadRequest
from service.upload import UploadStatus
from service.view import (
    batch_list,
    batch_object,
    file_list,
    file_object,
    model_object,
    plain,
    upload_object,
    upload_part_object,
)
from service.wire import CreateBatch, window

AT = datetime(2026, 3, 1, 12, 0, 0, 999_000, tzinfo=UTC)
SECONDS = 1_772_366_400
GOOD: dict[str, Any] = {
    "input_file_id": "file-1",
    "endpoint": "/v1/embeddings",
    "completion_window": "24h",
}


@pytest.mark.parametrize(
    ("text", "hours"), [("1h", 1), ("24h", 24), ("99h", 99), ("100h", 100), ("168h", 168)]
)
def test_a_window_is_whole_hours(text: str, hours: int) -> None:
    assert window(text) == timedelta(hours=hours)


@pytest.mark.parametrize(
    "text",
    ["", "h", "0h", "169h", "999h", "1000h", "024h", "1.5h", "-1h", "+1h", "24", "24H", "24 h",
     " 24h", "24h\n", "1d", "60m", "24hours", "٢٤h"],
)  # fmt: skip
def test_any_other_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number of hours"):
        window(text)
    assert _refusal({**GOOD, "completion_window": text}) == ("completion_window", "invalid_value")


def test_the_least_request_is_taken() -> None:
    posted = _parse(GOOD)
    assert posted.metadata is None
    assert posted.output_expires_after is None


def test_the_fullest_request_is_taken() -> None:
    metadata = {f"{number:02}" + "k" * 62: "v" * 512 for number in range(16)}
    posted = _parse(
        {
            **GOOD,
            "metadata": metadata,
            "output_expires_after": {"anchor": "created_at", "seconds": 2_592_000},
        }
    )
    assert posted.metadata == metadata
    assert posted.output_expires_after is not None
    assert posted.output_expires_after.seconds == 2_592_000


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (_without("input_file_id"), "input_file_id", "missing_required_parameter"),
        (_without("endpoint"), "endpoint", "missing_required_parameter"),
        (_without("completion_window"), "completion_window", "missing_required_parameter"),
        ({**GOOD, "input_file_id": None}, "input_file_id", "invalid_type"),
        ({**GOOD, "input_file_id": 7}, "input_file_id", "invalid_type"),
        ({**GOOD, "endpoint": ["/v1/embeddings"]}, "endpoint", "invalid_type"),
        ({**GOOD, "completion_window": 24}, "completion_window", "invalid_type"),
        ({**GOOD, "metadata": "tags"}, "metadata", "invalid_type"),
        ({**GOOD, "metadata": ["a"]}, "metadata", "invalid_type"),
        ({**GOOD, "metadata": {"tags": ["a"]}}, "metadata.tags", "invalid_type"),
        ({**GOOD, "metadata": {"tags": 1}}, "metadata.tags", "invalid_type"),
        ({**GOOD, "metadata": {"tags": None}}, "metadata.tags", "invalid_type"),
        ({**GOOD, "metadata": {"tags": "v" * 513}}, "metadata.tags", "invalid_value"),
        ({**GOOD, "metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
        ({**GOOD, "metadata": {str(n): "v" for n in range(17)}}, "metadata", "invalid_value"),
        ({**GOOD, "metadata": {"tags": "a\0b"}}, "metadata.tags", "invalid_value"),
        ({**GOOD, "metadata": {"a\0b": "tags"}}, "metadata", "invalid_value"),
        ({**GOOD, "metadata": {"tags": "\ud800"}}, "metadata.tags", "invalid_value"),
        ({**GOOD, "metadata": {"\ud800": "tags"}}, "metadata", "invalid_value"),
        ({**GOOD, "model": "m"}, "model", "unknown_parameter"),
        ({**GOOD, "output_expires_after": 3600}, "output_expires_after", "invalid_type"),
        (
            {**GOOD, "output_expires_after": {"seconds": 3600}},
            "output_expires_after.anchor",
            "missing_required_parameter",
        ),
        (
            {**GOOD, "output_expires_after": {"anchor": "now", "seconds": 3600}},
            "output_expires_after.anchor",
            "invalid_value",
        ),
        (
            {**GOOD, "output_expires_after": {"anchor": "created_at", "seconds": 3599}},
            "output_expires_after.seconds",
            "invalid_value",
        ),
        (
            {**GOOD, "output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
            "output_expires_after.seconds",
            "invalid_value",
        ),
        (
            {**GOOD, "output_expires_after": {"anchor": "created_at", "seconds": "3600"}},
            "output_expires_after.seconds",
            "invalid_type",
        ),
        (
            {**GOOD, "output_expires_after": {"anchor": "created_at", "seconds": True}},
            "output_expires_after.seconds",
            "invalid_type",
        ),
        ([GOOD], None, "invalid_type"),
        (None, None, "invalid_type"),
        ("text", None, "invalid_type"),
    ],
)
def test_a_wrong_request_names_where(body: Any, param: str | None, code: str) -> None:
    assert _refusal(body) == (param, code)


def test_a_wrong_type_says_what_was_wanted_and_what_came() -> None:
    with pytest.raises(BadRequest) as caught:
        _parse({**GOOD, "metadata": {"tags": ["a"]}})
    assert caught.value.message == (
        "Invalid type for 'metadata.tags': expected a string, but got an array instead."
    )


def test_a_missing_field_has_the_reference_s_words() -> None:
    with pytest.raises(BadRequest) as caught:
        _parse(_without("endpoint"))
    assert caught.value.message == "Missing required parameter: 'endpoint'."


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{", b"{}}", b"\xff{}", b'{"a": NaN}', b"[" * 200_000, b'{"a": 1e}', b"\0"],
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body, CreateBatch)
    assert caught.value.code == "invalid_json"
    assert caught.value.param is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


# How long it takes to make an example says nothing on a busy machine.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: json_values | st.just(GOOD.get(name, {"k": "v"}))
            for name in (*GOOD, "metadata", "output_expires_after", "other")
        },
    )
)
def test_any_json_is_a_request_or_a_bad_request(body: dict[str, Any]) -> None:
    # Nothing but a BadRequest may come out of it, and nothing is changed on the way in.
    with suppress(BadRequest):
        assert _parse(body).model_dump(exclude_none=True) == {
            key: value for key, value in body.items() if value is not None
        }


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "0"),
        ("0.000000000000", "0"),
        ("0E-12", "0"),
        ("0.000001230000", "0.00000123"),
        ("1E+2", "100"),
        ("100", "100"),
        ("100.500", "100.5"),
        ("120.000", "120"),
        ("0.000000000001", "0.000000000001"),
        ("999999999999.999999999999", "999999999999.999999999999"),
    ],
)
def test_money_is_an_exact_plain_decimal(amount: str, shown: str) -> None:
    assert plain(Decimal(amount)) == shown


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=12))
def test_money_keeps_its_value(amount: Decimal) -> None:
    shown = plain(amount)
    assert Decimal(shown) == amount
    assert "E" not in shown
    assert not ("." in shown and shown.endswith(("0", ".")))


def test_a_file_has_every_key_of_the_reference() -> None:
    shown = file_object(_file()).model_dump(mode="json")
    assert shown == {
        "id": f"file-{'0' * 31}1",
        "object": "file",
        "bytes": 12,
        "created_at": SECONDS,
        "expires_at": None,
        "filename": "a.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert set(openai.types.FileObject.model_fields) <= set(shown)


def test_an_upload_and_its_parts_have_the_keys_of_the_reference() -> None:
    upload = Upload(
        id=UUID(int=1),
        project_id=UUID(int=2),
        purpose="batch",
        filename="a.jsonl",
        mime_type="application/jsonl",
        bytes=5,
        status=UploadStatus.PENDING,
        created_at=AT,
        expires_at=AT + timedelta(hours=1),
    )
    shown = upload_object(upload, status=UploadStatus.EXPIRED).model_dump(mode="json")
    assert shown == {
        "id": "upload_" + "0" * 31 + "1",
        "object": "upload",
        "bytes": 5,
        "created_at": SECONDS,
        "expires_at": SECONDS + 3_600,
        "filename": "a.jsonl",
        "purpose": "batch",
        "status": "expired",
        "file": None,
    }
    assert set(shown) == set(openai.types.Upload.model_fields)
    done = upload_object(upload, status=UploadStatus.COMPLETED, file=_file())
    assert done.file == file_object(_file())
    part = UploadPart(id=UUID(int=3), upload_id=upload.id, bytes=5, created_at=AT)
    assert upload_part_object(part).model_dump() == {
        "id": "part_" + "0" * 31 + "3",
        "object": "upload.part",
        "created_at": SECONDS,
        "upload_id": shown["id"],
    }


def test_a_batch_has_every_key_of_the_reference_and_one_of_ours() -> None:
    shown = batch_object(_batch()).model_dump(mode="json")
    assert set(shown) == {*openai.types.Batch.model_fields, "halfrate"}
    assert shown["errors"] is None
    assert shown["created_at"] == SECONDS
    assert shown["expires_at"] == SECONDS + 86_400
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert shown["usage"] is None
    assert shown["metadata"] is None
    assert shown["halfrate"] == {
        "error_count": 0,
        "cost": {"currency": "USD", "standard": "0", "paid": "0", "saved": "0"},
        "paused": False,
        "retry_of": None,
        "retried_by": None,
        "engine": None,
    }


def test_what_the_engine_did_is_shown_once_a_line_has_succeeded() -> None:
    ran = {
        "input_tokens": 90,
        "output_tokens": 10,
        "computed_tokens": 80,
        "useful_tokens": 60,
        "engine_s": 0.5,
        "engine_rows": 6,
        "engine_steps": 1.5,
        "cached_tokens": 21,
        "first_token_s": 3.0,
        "later_tokens": 4,
        "later_tokens_s": 0.02,
        "preempted": 2,
    }
    assert batch_object(_batch(**ran, failed=1)).halfrate.engine is None
    running = batch_object(_batch(**ran, completed=7)).halfrate.engine
    assert running is not None
    assert running.model_dump() == {
        "tokens": 100,
        "computed_tokens": 80,
        "padding": 0.25,
        "seconds": 0.5,
        "tokens_per_second": 200.0,
        "rows_per_step": 4.0,
        "p50_ms": None,
        "p95_ms": None,
        "cached_tokens": 21,
        "preempted": 2,
        "ttft_ms": 500.0,
        "tpot_ms": 5.0,
    }
    ended = batch_object(_batch(**ran, completed=7, p50_ms=0.12345, p95_ms=2.0)).halfrate.engine
    assert ended is not None
    assert (ended.p50_ms, ended.p95_ms) == (0.123, 2.0)


def test_a_batch_of_which_nothing_was_computed_has_no_rates() -> None:
    """Every line repeats what another batch had computed."""
    shown = batch_object(_batch(completed=2, input_tokens=5)).halfrate.engine
    assert shown is not None
    assert (shown.tokens, shown.computed_tokens, shown.padding) == (5, 0, 0.0)
    assert (shown.tokens_per_second, shown.rows_per_step) == (None, None)
    assert (shown.ttft_ms, shown.tpot_ms) == (None, None)


def test_counts_are_shown_once_the_input_is_accepted() -> None:
    running = _batch(status=BatchStatus.IN_PROGRESS, in_progress_at=AT, total=9, completed=3)
    assert batch_object(running).request_counts.model_dump() == {
        "total": 9,
        "completed": 3,
        "failed": 0,
    }


@pytest.mark.parametrize(
    "status",
    [BatchStatus.VALIDATING, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED],
)
def test_counts_are_zero_of_a_batch_that_never_ran(status: BatchStatus) -> None:
    shown = batch_object(_batch(status=status, total=9))
    assert shown.request_counts.model_dump() == {"total": 0, "completed": 0, "failed": 0}


@pytest.mark.parametrize("status", list(BatchStatus))
def test_usage_is_shown_when_the_batch_has_ended(status: BatchStatus) -> None:
    shown = batch_object(
        _batch(status=status, in_progress_at=AT, input_tokens=7, cached_tokens=2, output_tokens=3)
    )
    if status in TERMINAL - {BatchStatus.FAILED}:
        assert shown.usage is not None
        assert shown.usage.model_dump() == {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        }
    else:
        assert shown.usage is None


def test_a_failed_batch_shows_a_thousand_errors_and_a_list_a_hundred() -> None:
    errors = [
        {"code": "invalid_json_line", "message": "m", "param": None, "line": line}
        for line in range(1, 1_202)
    ]
    failed = _batch(status=BatchStatus.FAILED, errors=errors, error_count=5_000)
    alone, listed = batch_object(failed), batch_list([failed], limit=20).data[0]
    assert alone.errors is not None
    assert listed.errors is not None
    assert [error.line for error in alone.errors.data] == list(range(1, 1_001))
    assert [error.line for error in listed.errors.data] == list(range(1, 101))
    assert alone.halfrate.error_count == listed.halfrate.error_count == 5_000


def test_the_saving_is_what_was_not_paid() -> None:
    shown = batch_object(_batch(standard_cost=Decimal("0.30"), paid_cost=Decimal("0.15")))
    assert shown.halfrate.cost.model_dump() == {
        "currency": "USD",
        "standard": "0.3",
        "paid": "0.15",
        "saved": "0.15",
    }


@pytest.mark.parametrize(("rows", "shown", "more"), [(0, 0, False), (2, 2, False), (3, 2, True)])
def test_one_row_too_many_says_that_there_is_more(rows: int, shown: int, more: bool) -> None:
    files = [_file(number) for number in range(1, rows + 1)]
    page = file_list(files, limit=2)
    assert len(page.data) == shown
    assert page.has_more is more
    assert page.first_id == (page.data[0].id if shown else None)
    assert page.last_id == (page.data[-1].id if shown else None)


def test_a_model_has_every_key_of_the_reference_and_its_price() -> None:
    model = Model(
        id="m",
        kind=ModelKind.EMBED,
        source="stub:",
        price_input=Decimal("0.020"),
        discount=Decimal("0.50"),
    )
    shown = model_object(model).model_dump(mode="json")
    openai.types.Model.model_validate(shown)
    assert shown["halfrate"] == {
        "kind": "embed",
        "endpoints": ["/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/score"],
        "context_length": None,
        "price": {"currency": "USD", "input": "0.02", "output": "0", "batch_discount": "0.5"},
    }


def _parse(body: Any) -> CreateBatch:
    return parse(json.dumps(body).encode(), CreateBatch)


def _refusal(body: Any) -> tuple[str | None, str | None]:
    with pytest.raises(BadRequest) as caught:
        _parse(body)
    return caught.value.param, caught.value.code


def _file(number: int = 1) -> File:
    return File(
        id=UUID(int=number),
        project_id=UUID(int=1),
        purpose="batch",
        filename="a.jsonl",
        bytes=12,
        storage_key="files/1/1",
        created_at=AT,
        expires_at=None,
        deleted_at=None,
    )


def _batch(**changed: Any) -> Batch:
    values: dict[str, Any] = {
        "id": UUID(int=1),
        "project_id": UUID(int=1),
        "endpoint": "/v1/embeddings",
        "input_file_id": UUID(int=2),
        "completion_window": "24h",
        "metadata_": None,
        "status": BatchStatus.VALIDATING,
        "created_at": AT,
        "expires_at": AT + timedelta(hours=24),
        "total": 0,
        "completed": 0,
        "failed": 0,
        "input_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "standard_cost": Decimal(0),
        "paid_cost": Decimal(0),
        "computed_tokens": 0,
        "useful_tokens": 0,
        "engine_s": 0.0,
        "engine_rows": 0,
        "engine_steps": 0.0,
        "first_token_s": 0.0,
        "later_tokens": 0,
        "later_tokens_s": 0.0,
        "preempted": 0,
        "errors": None,
        "error_count": 0,
    }
    return Batch(**{**values, **changed})
