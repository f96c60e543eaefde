"""Which engine workers live, and how fast do they run each model?"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.db.models import ModelSpeed, Worker


def beat(session: Session, name: str, models: Sequence[str], now: datetime) -> None:
    """The worker is alive and serves these models."""
    statement = insert(Worker).values(
        name=name, models=list(models), started_at=now, heartbeat_at=now
    )
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["name"], set_={"heartbeat_at": now, "models": list(models)}
        )
    )


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
