"""Which engine workers live, what have they done, and how fast do they run each model?"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.db.models import ModelSpeed, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one worker's engine of one model has done since the worker started, and how it runs.

    `computed_tokens` went through the model, `padding_tokens` of them for no text's sake.
    `busy_s` is the time of its steps, `idle_s` that in which it had nothing to do although shards
    were open. `running` sums over its steps how many sequences ran, `seats` how many could have, as
    long as there was more to run. `kv_held` of at most `kv_tokens` tokens of the KV memory are in
    use now. The percentiles are of the last lines' shares of its time, of the last answers' times
    from their beginning to their first token, and of their times for each token after it, in
    seconds.

    Every field has a default: workers of another version write what they know.
    """

    path: str = ""
    same_bytes: bool = False
    token_budget: int = 0
    memory_bytes: int | None = None
    requests: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    steps: int = 0
    rows: int = 0
    twins: int = 0
    out_of_memory: int = 0
    non_finite: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    guessed_tokens: int = 0
    guessed_right: int = 0
    running: int = 0
    seats: int = 0
    kv_held: int | None = None
    kv_tokens: int | None = None
    queue_depth: int = 0
    open_shards: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    tokens_per_s: float | None = None
    lines: int = 0
    lines_s: float = 0.0
    line_p50_s: float | None = None
    line_p95_s: float | None = None
    firsts: int = 0
    firsts_s: float = 0.0
    first_p50_s: float | None = None
    first_p95_s: float | None = None
    laters: int = 0
    laters_s: float = 0.0
    later_p50_s: float | None = None
    later_p95_s: float | None = None


_KNOWN = frozenset(field.name for field in fields(Figures))


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker as its last heartbeat shows it; `figures` by model."""

    name: str
    started_at: datetime
    heartbeat_at: datetime
    figures: Mapping[str, Figures]


def beat(session: Session, name: str, figures: Mapping[str, Figures], now: datetime) -> None:
    """The worker is alive and serves these models."""
    values = {
        "models": list(figures),
        "heartbeat_at": now,
        "figures": {model: asdict(each) for model, each in figures.items()},
    }
    session.execute(
        insert(Worker)
        .values(name=name, started_at=now, **values)
        .on_conflict_do_update(index_elements=["name"], set_=values)
    )


def living(session: Session) -> list[LiveWorker]:
    """Every worker that has not been forgotten."""
    return [
        LiveWorker(row.name, row.started_at, row.heartbeat_at, _figures(row.figures))
        for row in session.scalars(select(Worker).order_by(Worker.name))
    ]


def _figures(written: dict[str, Any]) -> Mapping[str, Figures]:
    return {
        model: Figures(**{name: value for name, value in each.items() if name in _KNOWN})
        for model, each in written.items()
    }


def leave(session: Session, name: str) -> None:
    """The worker stops."""
    session.execute(delete(Worker).where(Worker.name == name))


def forget(session: Session, now: datetime, silence: timedelta) -> None:
    """Drop workers that have not been heard of for so long."""
    session.execute(delete(Worker).where(Worker.heartbeat_at < now - silence))


def served(session: Session) -> set[str]:
    """Models that a live worker serves."""
    return set(session.scalars(select(func.unnest(Worker.models)).distinct()))


def measure(session: Session, model: str, tokens_per_s: float, now: datetime) -> None:
    """Note a measured speed; half of the old value stays: one odd shard must not mislead."""
    statement = insert(ModelSpeed).values(model=model, tokens_per_s=tokens_per_s, measured_at=now)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["model"],
            set_={
                "tokens_per_s": (ModelSpeed.tokens_per_s + tokens_per_s) / 2,
                "measured_at": now,
            },
        )
    )


def speeds(session: Session) -> Mapping[str, float]:
    """Measured tokens a second, by model."""
    return {row.model: row.tokens_per_s for row in session.scalars(select(ModelSpeed))}
