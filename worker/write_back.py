"""How do finished lines reach the database? One part object, then one transaction.

The object goes first, under a key that holds the attempt; rows that name it follow. If either
fails nothing of the part counts, and the lines run again.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import structlog

from service.batch import Ask, LineState
from service.catalog import Model
from service.db import lines, session
from service.db.queue import Lease, LeaseLost
from service.places import part_key
from service.prices import cost
from worker.answers import Answered, response_line
from worker.resources import Resources

log = structlog.get_logger()

SUCCEEDED, FAILED = b"o", b"e"
HEADER_BYTES = 13
"""Before each response line in a part: its line number in 12 digits, then `o` or `e`."""


class Record(NamedTuple):
    """One entry of a part: which line, which file it goes to, and the bytes of the line."""

    line: int
    kind: bytes
    data: bytes


def encode(record: Record) -> bytes:
    """The record as it stands in a part, its line end included."""
    return b"%012d%b%b\n" % (record.line, record.kind, record.data)


def decode(raw: bytes) -> Record:
    """The record in one line of a part, without its line end."""
    return Record(int(raw[:12]), raw[12:13], raw[13:])


def flush(
    resources: Resources, lease: Lease, model: Model, sequence: int, answered: Sequence[Answered]
) -> Ask:
    """Write back these lines; answers what the batch asks, as far as a write has shown it.

    Raises LeaseLost, and then none of them is recorded.
    """
    if not answered:
        return Ask.GO_ON
    data, rows = _part(answered)
    costs = [
        cost(model, input_tokens=row.input_tokens, output_tokens=row.output_tokens) for row in rows
    ]
    key = part_key(lease.batch_id, lease.id, lease.attempt, sequence)
    part = lines.NewPart(
        sequence=sequence,
        storage_key=key,
        bytes=len(data),
        model=model.id,
        standard_cost=sum((each.standard for each in costs), Decimal(0)),
        paid_cost=sum((each.paid for each in costs), Decimal(0)),
        effort=sum((each.effort for each in answered), lines.Effort()),
    )
    resources.storage.put(key, data)
    try:
        with resources.database.transaction() as transaction:
            asked = lines.record(transaction, lease, part, rows, session.now(transaction))
    except LeaseLost:
        resources.storage.delete([key])
        raise
    log.debug("flushed", batch=lease.batch_id.hex, shard=lease.id.hex, lines=len(rows))
    return asked


def _part(answered: Sequence[Answered]) -> tuple[bytes, list[lines.Answer]]:
    """The object, sorted by line, and where each line stands in it."""
    data = bytearray()
    rows: list[lines.Answer] = []
    for answer in sorted(answered, key=lambda each: each.line):
        kind = SUCCEEDED if answer.succeeded else FAILED
        encoded = encode(Record(answer.line, kind, response_line(answer)))
        rows.append(
            lines.Answer(
                line=answer.line,
                state=LineState.SUCCEEDED if answer.succeeded else LineState.FAILED,
                status_code=answer.status_code,
                error_code=answer.error_code,
                input_tokens=answer.input_tokens,
                cached_tokens=answer.cached_tokens,
                output_tokens=answer.output_tokens,
                engine_ms=answer.effort.engine_s * 1000 if answer.succeeded else None,
                part_offset=len(data) + HEADER_BYTES,
                part_length=len(encoded) - HEADER_BYTES - 1,
            )
        )
        data += encoded
    return bytes(data), rows
