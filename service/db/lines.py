"""How do request lines come in, get their answers, and freeze? By COPY and set-based UPDATEs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.batch import Ask, LineState, ask
from service.db import queue
from service.db.models import Batch, Part, RequestLine, UsageEntry
from service.db.session import driver
from service.ids import new_id


@dataclass(frozen=True, slots=True)
class NewLine:
    """A validated line and where its bytes stand in the input object."""

    line: int
    custom_id: str
    byte_offset: int
    byte_length: int


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line that has no answer yet."""

    line: int
    custom_id: str
    byte_offset: int
    byte_length: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A line's final answer and where its response line stands in the part (bytes).

    `engine_ms` is null where no engine answered.
    """

    line: int
    state: LineState
    status_code: int
    error_code: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    engine_ms: float | None
    part_offset: int
    part_length: int


@dataclass(frozen=True, slots=True)
class Effort:
    """What lines cost the engine, as the batch's columns of these names hold it.

    `computed_tokens` went through the model, `useful_tokens` of them for the texts' own sake;
    `engine_s` is their share of its time. `engine_rows` sequences filled `engine_steps` steps: one
    that shared its step with three others counts as a quarter of a step. Of answers that are made
    token by token, `first_token_s` is how long their first tokens took from when their prompts were
    begun, `later_tokens_s` how long all `later_tokens` took from then; `preempted` of them had to
    wait in the middle for memory.
    """

    computed_tokens: int = 0
    useful_tokens: int = 0
    engine_s: float = 0.0
    engine_rows: int = 0
    engine_steps: float = 0.0
    first_token_s: float = 0.0
    later_tokens: int = 0
    later_tokens_s: float = 0.0
    preempted: int = 0

    def __add__(self, other: "Effort") -> "Effort":
        """Both, field by field."""
        return Effort(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """How long the engine took for a line of a batch, in ms; None where it answered none."""

    p50_ms: float | None
    p95_ms: float | None


@dataclass(frozen=True, slots=True)
class NewPart:
    """An object that has been put and is to be recorded."""

    sequence: int
    storage_key: str
    bytes: int
    model: str
    standard_cost: Decimal
    paid_cost: Decimal
    effort: Effort


def copy_in(session: Session, batch_id: UUID, rows: Iterable[NewLine]) -> int:
    """COPY the lines of one batch; answers how many. Rows stream: none is kept."""
    count = 0
    statement = (
        "COPY request_lines (batch_id, line, custom_id, byte_offset, byte_length) FROM STDIN"
    )
    with driver(session).cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row((batch_id, row.line, row.custom_id, row.byte_offset, row.byte_length))
            count += 1
    return count


def duplicates(session: Session, batch_id: UUID, *, limit: int) -> tuple[int, list[NewLine]]:
    """Lines whose custom_id stands on an earlier line: how many, and the first `limit`.

    Postgres sorts (on disk where it must), so a million ids need no memory here.
    """
    repeated = (
        select(
            RequestLine.line,
            RequestLine.custom_id,
            RequestLine.byte_offset,
            RequestLine.byte_length,
            func.row_number()
            .over(partition_by=RequestLine.custom_id, order_by=RequestLine.line)
            .label("nth"),
        )
        .where(RequestLine.batch_id == batch_id)
        .subquery()
    )
    found = session.execute(
        select(
            repeated.c.line,
            repeated.c.custom_id,
            repeated.c.byte_offset,
            repeated.c.byte_length,
            func.count().over().label("number"),
        )
        .where(repeated.c.nth > 1)
        .order_by(repeated.c.line)
        .limit(limit)
    ).all()
    number = found[0].number if found else 0
    return number, [NewLine(*row[:4]) for row in found]


_TAKE_OVER = text(
    """
    INSERT INTO request_lines (batch_id, line, custom_id, byte_offset, byte_length)
    SELECT :batch_id, line, custom_id, byte_offset, byte_length FROM request_lines
    WHERE batch_id = :source_id AND state IN ('failed', 'expired', 'cancelled')
    """
)


def take_over(session: Session, batch_id: UUID, *, source_id: UUID) -> int:
    """Give the batch the lines that an ended one left without a success; answers how many.

    They keep number, custom_id and place in the input file.
    """
    return (
        session.connection()
        .execute(_TAKE_OVER, {"batch_id": batch_id, "source_id": source_id})
        .rowcount
    )


_REMOVE = text(
    """
    WITH taken AS (
        SELECT line FROM request_lines WHERE batch_id = :batch_id AND line > :after
        ORDER BY line LIMIT :limit
    ), gone AS (
        DELETE FROM request_lines AS line USING taken
        WHERE line.batch_id = :batch_id AND line.line = taken.line
    )
    SELECT max(line) FROM taken
    """
)


def remove(session: Session, batch_id: UUID, *, after: int, limit: int) -> int | None:
    """Delete the next `limit` lines behind `after`; the last one's number, None for no more."""
    given = {"batch_id": batch_id, "after": after, "limit": limit}
    last: int | None = session.connection().execute(_REMOVE, given).scalar_one()
    return last


def drop(session: Session, batch_id: UUID) -> None:
    """Remove every line of a batch that never ran."""
    session.execute(delete(RequestLine).where(RequestLine.batch_id == batch_id))


_PENDING = select(
    RequestLine.line,
    RequestLine.custom_id,
    RequestLine.byte_offset,
    RequestLine.byte_length,
    RequestLine.attempts,
).where(RequestLine.state == LineState.PENDING)


def pending(session: Session, batch_id: UUID, lines: Sequence[int]) -> list[PendingLine]:
    """Of `lines`, those without an answer, by byte offset."""
    mine = _PENDING.where(
        RequestLine.batch_id == batch_id, RequestLine.line == func.any(list(lines))
    )
    rows = session.execute(mine.order_by(RequestLine.byte_offset)).all()
    return [PendingLine(*row) for row in rows]


def pending_after(session: Session, batch_id: UUID, *, after: int, limit: int) -> list[PendingLine]:
    """The next `limit` lines without an answer behind line `after`, by number, as by offset."""
    mine = _PENDING.where(RequestLine.batch_id == batch_id, RequestLine.line > after)
    rows = session.execute(mine.order_by(RequestLine.line).limit(limit)).all()
    return [PendingLine(*row) for row in rows]


def page(
    session: Session, batch_id: UUID, *, state: LineState | None, after: int, limit: int
) -> list[RequestLine]:
    """At most `limit` lines behind line `after`, in input order; of one state, where it is given.

    No index knows the states: one that did would be written with every answer. So a rare state is
    found by reading the batch's lines, a few hundred thousand a second.
    """
    query = select(RequestLine).where(RequestLine.batch_id == batch_id, RequestLine.line > after)
    if state is not None:
        query = query.where(RequestLine.state == state)
    return list(session.scalars(query.order_by(RequestLine.line).limit(limit)))


def is_there(session: Session, batch_id: UUID, line: int) -> bool:
    """Whether the batch has a line of that number."""
    return session.get(RequestLine, (batch_id, line)) is not None


# One statement whatever the number of lines. `state = 'pending'` is a second fence: a line that
# expiry, a cancel or another attempt decided is not touched.
_ANSWER = text(
    """
    UPDATE request_lines AS line
    SET state = answer.state, attempts = line.attempts + 1, next_try_at = NULL,
        status_code = answer.status_code, error_code = answer.error_code,
        input_tokens = answer.input_tokens, cached_tokens = answer.cached_tokens,
        output_tokens = answer.output_tokens, engine_ms = answer.engine_ms, part_id = :part_id,
        part_offset = answer.part_offset, part_length = answer.part_length
    FROM unnest(
        CAST(:line AS integer[]), CAST(:state AS text[]), CAST(:status_code AS smallint[]),
        CAST(:error_code AS text[]), CAST(:input_tokens AS integer[]),
        CAST(:cached_tokens AS integer[]), CAST(:output_tokens AS integer[]),
        CAST(:engine_ms AS real[]), CAST(:part_offset AS bigint[]), CAST(:part_length AS integer[])
    ) AS answer(line, state, status_code, error_code, input_tokens, cached_tokens,
                output_tokens, engine_ms, part_offset, part_length)
    WHERE line.batch_id = :batch_id AND line.line = answer.line AND line.state = 'pending'
    """
)


def record(
    session: Session, lease: queue.Lease, part: NewPart, answers: Sequence[Answer], now: datetime
) -> Ask:
    """Write back: the part, its lines' answers, the batch's counts and sums, and the ledger.

    Answers what the batch asks, by which a worker learns of a cancel.

    Raises LeaseLost, and then nothing of it stands. Doing it twice (a commit of unknown outcome)
    leaves the same rows.
    """
    batch = queue.lock_batch(session, lease.batch_id)
    # Before the fence: a part that is recorded stays so, whoever holds the shard by now.
    part_id = _add_part(session, lease, part, len(answers), now)
    asked = ask(batch.status, paused=batch.paused_at is not None)
    if part_id is None:
        return asked
    queue.hold(session, lease)
    columns: dict[str, list[Any]] = {
        name: [getattr(answer, name) for answer in answers] for name in Answer.__slots__
    }
    written = session.connection().execute(
        _ANSWER, {"batch_id": lease.batch_id, "part_id": part_id, **columns}
    )
    if written.rowcount != len(answers):
        raise queue.LeaseLost(lease)
    succeeded = sum(answer.state is LineState.SUCCEEDED for answer in answers)
    used = {name: sum(columns[name]) for name in ("input_tokens", "cached_tokens", "output_tokens")}
    session.execute(
        update(Batch)
        .where(Batch.id == batch.id)
        .values(
            completed=Batch.completed + succeeded,
            failed=Batch.failed + len(answers) - succeeded,
            input_tokens=Batch.input_tokens + used["input_tokens"],
            cached_tokens=Batch.cached_tokens + used["cached_tokens"],
            output_tokens=Batch.output_tokens + used["output_tokens"],
            standard_cost=Batch.standard_cost + part.standard_cost,
            paid_cost=Batch.paid_cost + part.paid_cost,
            **{name: getattr(Batch, name) + more for name, more in asdict(part.effort).items()},
        )
    )
    session.execute(
        insert(UsageEntry).values(
            part_id=part_id,
            project_id=batch.project_id,
            batch_id=batch.id,
            model=part.model,
            standard_cost=part.standard_cost,
            paid_cost=part.paid_cost,
            created_at=now,
            **used,
        )
    )
    return asked


def _add_part(
    session: Session, lease: queue.Lease, part: NewPart, lines: int, now: datetime
) -> UUID | None:
    """The new part's id, or None where this very part has been recorded before."""
    return session.execute(
        insert(Part)
        .values(
            id=new_id(),
            batch_id=lease.batch_id,
            shard_id=lease.id,
            attempt=lease.attempt,
            sequence=part.sequence,
            storage_key=part.storage_key,
            bytes=part.bytes,
            lines=lines,
            created_at=now,
        )
        .on_conflict_do_nothing(index_elements=["shard_id", "attempt", "sequence"])
        .returning(Part.id)
    ).scalar()


def postpone(
    session: Session, batch_id: UUID, lines: Sequence[int], *, error_code: str, until: datetime
) -> None:
    """These lines failed in a way that may pass: count the attempt, note why and when next."""
    session.execute(
        update(RequestLine)
        .where(
            RequestLine.batch_id == batch_id,
            RequestLine.line == func.any(list(lines)),
            RequestLine.state == LineState.PENDING,
        )
        .values(attempts=RequestLine.attempts + 1, error_code=error_code, next_try_at=until)
    )


def freeze(session: Session, batch_id: UUID, state: LineState) -> None:
    """Every unfinished line of the batch → `state`."""
    session.execute(
        update(RequestLine)
        .where(RequestLine.batch_id == batch_id, RequestLine.state == LineState.PENDING)
        .values(state=state, next_try_at=None)
    )


def measure(session: Session, batch_id: UUID) -> tuple[int, Spread]:
    """Bytes of the batch's longest response line, and the spread of its lines' time; one scan."""
    halves = func.percentile_disc([0.5, 0.95]).within_group(RequestLine.engine_ms)
    longest, spread = session.execute(
        select(func.max(RequestLine.part_length), halves).where(RequestLine.batch_id == batch_id)
    ).one()
    return longest or 0, Spread(*(spread or (None, None)))


def unanswered(session: Session, batch_id: UUID) -> Iterator[tuple[int, str, LineState]]:
    """Lines that expired or were cancelled, in input order, streamed by a server-side cursor."""
    rows = session.execute(
        select(RequestLine.line, RequestLine.custom_id, RequestLine.state)
        .where(
            RequestLine.batch_id == batch_id,
            RequestLine.state.in_([LineState.EXPIRED, LineState.CANCELLED]),
        )
        .order_by(RequestLine.line),
        execution_options={"yield_per": 2_000},
    )
    for row in rows:
        yield row.line, row.custom_id, row.state
