"""What must hold of every ended batch, however it came to its end?"""

from collections import Counter
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import func, select

from service.batch import TERMINAL, BatchStatus, LineState
from service.db.models import Batch, File, UsageEntry
from service.ids import Prefix
from service.prices import cost
from tests.pipeline import Pipeline

NEVER_RAN = {"batch_expired", "batch_cancelled"}
TOKENS = ("input_tokens", "cached_tokens", "output_tokens")


def check(pipeline: Pipeline, batch_id: UUID) -> Batch:
    """CONTRACT.md's invariant, the sums of money and tokens, and a store without leftovers."""
    batch = pipeline.batch(batch_id)
    assert batch.status in TERMINAL
    output, errors = pipeline.output(batch_id), pipeline.errors(batch_id)
    _check_lines(pipeline, batch, output, errors)
    _check_counts(batch, output, errors)
    _check_sums(pipeline, batch, output)
    _check_store(pipeline, batch)
    return batch


def _check_lines(
    pipeline: Pipeline, batch: Batch, output: list[dict[str, Any]], errors: list[dict[str, Any]]
) -> None:
    rows = pipeline.line_rows(batch.id)
    assert len(rows) == batch.total
    order = {row.custom_id: row.line for row in rows}
    names = Counter(line["custom_id"] for line in output + errors)
    assert names == Counter(dict.fromkeys(order, 1))
    for file in (output, errors):
        places = [order[line["custom_id"]] for line in file]
        assert places == sorted(places)
    ids = [line["id"] for line in output + errors]
    assert len(set(ids)) == len(ids)
    assert all(each.startswith(Prefix.LINE) for each in ids)
    states = {row.custom_id: row.state for row in rows}
    for line in output:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"].startswith(Prefix.REQUEST)
        assert states[line["custom_id"]] is LineState.SUCCEEDED
    for line in errors:
        _check_error_line(line, states[line["custom_id"]])


def _check_error_line(line: dict[str, Any], state: LineState) -> None:
    assert set(line) == {"id", "custom_id", "response", "error"}
    if line["response"] is None:
        expected = {"batch_expired": LineState.EXPIRED, "batch_cancelled": LineState.CANCELLED}
        assert state is expected[line["error"]["code"]]
        assert set(line["error"]) == {"code", "message"}
    else:
        assert line["error"] is None
        assert line["response"]["status_code"] >= 400
        assert set(line["response"]["body"]["error"]) == {"message", "type", "param", "code"}
        assert state is LineState.FAILED


def _check_counts(batch: Batch, output: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    answered = [line for line in errors if line["response"] is not None]
    assert (batch.completed, batch.failed) == (len(output), len(answered))
    assert (batch.output_file_id is None) == (not output)
    assert (batch.error_file_id is None) == (not errors)
    if batch.status is BatchStatus.COMPLETED:
        assert batch.completed + batch.failed == batch.total


def _check_sums(pipeline: Pipeline, batch: Batch, output: list[dict[str, Any]]) -> None:
    with pipeline.resources.database.transaction() as transaction:
        ledger = transaction.execute(
            select(
                *(func.coalesce(func.sum(getattr(UsageEntry, name)), 0) for name in TOKENS),
                func.coalesce(func.sum(UsageEntry.standard_cost), 0),
                func.coalesce(func.sum(UsageEntry.paid_cost), 0),
            ).where(UsageEntry.batch_id == batch.id)
        ).one()
    rows = pipeline.line_rows(batch.id)
    by_line = [sum(getattr(row, name) or 0 for row in rows) for name in TOKENS]
    of_batch = [getattr(batch, name) for name in TOKENS]
    assert list(ledger[:3]) == of_batch == by_line
    assert (ledger[3], ledger[4]) == (batch.standard_cost, batch.paid_cost)
    standard, paid = Decimal(0), Decimal(0)
    taken = {row.custom_id: row.input_tokens or 0 for row in rows}
    for line in output:
        body = line["response"]["body"]
        model = pipeline.resources.catalog.get(body["model"])
        assert model is not None
        # Moderations, as the reference has them, tell no usage.
        used = body.get("usage", {"prompt_tokens": taken[line["custom_id"]]})
        each = cost(
            model,
            input_tokens=used["input_tokens" if "input_tokens" in used else "prompt_tokens"],
            output_tokens=used.get("output_tokens", used.get("completion_tokens", 0)),
        )
        standard, paid = standard + each.standard, paid + each.paid
    assert (standard, paid) == (batch.standard_cost, batch.paid_cost)


def _check_store(pipeline: Pipeline, batch: Batch) -> None:
    """Once cleaned up, of parts nothing is left, and of results the published files alone."""
    storage = pipeline.resources.storage
    assert list(storage.list(f"parts/{batch.id.hex}/")) == []
    with pipeline.resources.database.transaction() as transaction:
        ids = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
        keys = set(transaction.scalars(select(File.storage_key).where(File.id.in_(ids))))
    assert set(storage.list(f"results/{batch.id.hex}/")) == keys
