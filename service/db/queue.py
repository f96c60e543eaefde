"""How is work claimed, kept and ended? The only SKIP LOCKED, and the only fence.

Stages and webhook deliveries (for CPU workers) and shards (for engine workers) are claimed alike: a
claim raises `attempt` and sets `lease_expires_at`; whatever the claimer writes afterwards names
that attempt. Locks are taken in one order everywhere: batch, then stage or shard, then lines.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, Engine, and_, case, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.batch import Ask, BatchStatus, ShardState, StageName, ask
from service.db.models import Batch, Shard, Stage
from service.db.session import driver
from service.db.webhook_models import Delivery
from service.ids import new_id

Claimable = type[Stage] | type[Shard] | type[Delivery]

CLAIMABLE: tuple[Claimable, ...] = (Stage, Shard, Delivery)

MAX_BACKOFF = timedelta(seconds=60)

SWEEP = 7307422
"""The advisory lock of the one process that removes bytes."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One claim of a stage, shard or delivery: the fence that its worker names in every write."""

    table: Claimable
    id: UUID
    batch_id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class ClaimedShard:
    """A shard under a lease. `lines` are physical line numbers in plan order."""

    lease: Lease
    model: str
    lines: tuple[int, ...]
    cost: int
    failures: int
    deaths: int
    claimed_at: datetime


class LeaseLost(Exception):
    """Another attempt, an expiry or a cancel took the claim: drop the work, write nothing."""

    def __init__(self, lease: Lease) -> None:
        name = lease.table.__tablename__
        super().__init__(f"lease on {name} {lease.id} attempt {lease.attempt} is lost")
        self.lease = lease


def add_stage(session: Session, batch_id: UUID, name: StageName, now: datetime) -> None:
    """Make `name` the batch's next stage; a second time is nothing."""
    session.execute(
        insert(Stage)
        .values(
            id=new_id(),
            batch_id=batch_id,
            name=name,
            state=ShardState.READY,
            attempt=0,
            not_before=now,
            failures=0,
        )
        .on_conflict_do_nothing(index_elements=["batch_id", "name"])
    )


def revive_stage(session: Session, batch_id: UUID, name: StageName, now: datetime) -> None:
    """A mend, and no legal move: a stage that is said to be over is made ready, since what it does
    has not been done. Its attempts are counted on, because keys in the store name them."""
    over = Stage.state.in_([ShardState.DONE, ShardState.DEAD])
    session.execute(
        update(Stage)
        .where(Stage.batch_id == batch_id, Stage.name == name, over)
        .values(state=ShardState.READY, not_before=now)
    )


def claim_stage(
    session: Session, name: StageName, *, worker: str, now: datetime, lease: timedelta
) -> Lease | None:
    """Lease the oldest ready stage of that name, or None."""
    chosen = session.scalar(
        select(Stage)
        .where(Stage.name == name, Stage.state == ShardState.READY, Stage.not_before <= now)
        .order_by(Stage.not_before, Stage.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if chosen is None:
        return None
    return _lease(session, chosen, worker=worker, until=now + lease)


@contextmanager
def only_one(engine: Engine, lock: int) -> Iterator[bool]:
    """Whether nobody else in any process is inside with this lock; it falls with the connection."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        got = connection.execute(select(func.pg_try_advisory_lock(lock))).scalar_one()
        try:
            yield got
        finally:
            if got:
                connection.execute(select(func.pg_advisory_unlock(lock)))


def stages_held(session: Session, *, worker: str) -> int:
    """How many stages that worker holds; until commit none of its processes claims another."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(worker, 0))))
    return session.execute(
        select(func.count())
        .select_from(Stage)
        .where(Stage.worker == worker, Stage.state == ShardState.LEASED)
    ).scalar_one()


def claim_shard(
    session: Session, model: str, *, worker: str, now: datetime, lease: timedelta
) -> ClaimedShard | None:
    """Lease the runnable shard of `model` that should run next, or None.

    Earliest deadline first, then plan order, so that shared prefixes meet in one worker.
    """
    chosen = session.scalar(
        select(Shard)
        .join(Batch, Batch.id == Shard.batch_id)
        .where(Shard.model == model, runnable(now))
        .order_by(Batch.expires_at, Batch.id, Shard.ordinal)
        .limit(1)
        .with_for_update(skip_locked=True, of=Shard)
    )
    if chosen is None:
        return None
    chosen.begun = False
    claim = _lease(session, chosen, worker=worker, until=now + lease)
    return ClaimedShard(
        lease=claim,
        model=chosen.model,
        lines=tuple(chosen.lines),
        cost=chosen.cost,
        failures=chosen.failures,
        deaths=chosen.deaths,
        claimed_at=now,
    )


def begin(session: Session, lease: Lease) -> None:
    """The claimed shard goes to the engine: if its worker is lost now, it may be why."""
    begun = session.execute(
        update(Shard).where(_fence(lease)).values(begun=True).returning(Shard.id)
    ).scalar()
    if begun is None:
        raise LeaseLost(lease)


def claim_delivery(
    session: Session, *, worker: str, now: datetime, lease: timedelta, per_endpoint: int
) -> Lease | None:
    """Lease a delivery that is due, those that failed least often first, or None.

    An endpoint has at most `per_endpoint` of them under way: a slow one holds up only itself.
    """
    full = (
        select(Delivery.endpoint_id)
        .where(Delivery.state == ShardState.LEASED)
        .group_by(Delivery.endpoint_id)
        .having(func.count() >= per_endpoint)
    )
    chosen = session.scalar(
        select(Delivery)
        .where(_due(now), Delivery.endpoint_id.not_in(full))
        .order_by(Delivery.failures, Delivery.not_before, Delivery.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if chosen is None:
        return None
    return _lease(session, chosen, worker=worker, until=now + lease)


def _due(now: datetime) -> ColumnElement[bool]:
    return and_(Delivery.state == ShardState.READY, Delivery.not_before <= now)


def delivers(session: Session, *, worker: str) -> bool:
    """Whether that worker has deliveries under way at this moment."""
    query = exists().where(Delivery.worker == worker, Delivery.state == ShardState.LEASED)
    return bool(session.execute(select(query)).scalar_one())


def _lease(
    session: Session, row: Stage | Shard | Delivery, *, worker: str, until: datetime
) -> Lease:
    row.state = ShardState.LEASED
    row.attempt += 1
    row.worker = worker
    row.lease_expires_at = until
    session.flush()
    return Lease(table=type(row), id=row.id, batch_id=row.batch_id, attempt=row.attempt)


def runnable(now: datetime) -> ColumnElement[bool]:
    """A shard (joined to its batch) that may be claimed now."""
    return and_(
        Shard.state == ShardState.READY,
        Shard.not_before <= now,
        Batch.status == BatchStatus.IN_PROGRESS,
        Batch.frozen_at.is_(None),
        Batch.paused_at.is_(None),
        Batch.expires_at > now,
    )


def _fence(lease: Lease) -> ColumnElement[bool]:
    table = lease.table
    return and_(
        table.id == lease.id,
        table.attempt == lease.attempt,
        table.state == ShardState.LEASED,
    )


def lock_batch(session: Session, batch_id: UUID) -> Batch:
    """The batch's row, locked until commit: the first lock of every write-back."""
    return session.execute(
        select(Batch)
        .where(Batch.id == batch_id)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).scalar_one()


def hold(session: Session, lease: Lease) -> None:
    """Lock the claimed row until commit. Raises LeaseLost if the claim no longer stands."""
    held = session.scalar(
        select(lease.table.id).where(_fence(lease)).with_for_update(key_share=True)
    )
    if held is None:
        raise LeaseLost(lease)


def renew(session: Session, lease: Lease, *, until: datetime) -> Ask:
    """Extend the claim; answers what the batch asks, by which a worker learns of a cancel."""
    renewed = session.execute(
        update(lease.table)
        .where(_fence(lease))
        .values(lease_expires_at=until)
        .returning(lease.table.id)
    ).scalar()
    if renewed is None:
        raise LeaseLost(lease)
    batch = session.execute(
        select(Batch.status, Batch.paused_at).where(Batch.id == lease.batch_id)
    ).one()
    return ask(batch.status, paused=batch.paused_at is not None)


def settle(session: Session, lease: Lease) -> None:
    """The work is done: leased → done."""
    _end(session, lease, state=ShardState.DONE)


def hand_back(session: Session, lease: Lease, *, not_before: datetime) -> None:
    """Not finished, through no fault of the work (shutdown, cancel, outage): leased → ready."""
    _end(session, lease, state=ShardState.READY, not_before=not_before)


def give_up(session: Session, lease: Lease, *, now: datetime) -> int:
    """The attempt ended in an exception: leased → ready after a backoff. Answers how often."""
    table = lease.table
    failures = session.execute(select(table.failures).where(table.id == lease.id)).scalar_one() + 1
    delay = min(timedelta(seconds=2.0 ** min(failures, 10)), MAX_BACKOFF)
    _end(session, lease, state=ShardState.READY, not_before=now + delay, failures=failures)
    return failures


def try_again(
    session: Session, lease: Lease, *, not_before: datetime, failures: int, outcome: str
) -> None:
    """The delivery was not taken: leased → ready, until then."""
    _end(
        session,
        lease,
        state=ShardState.READY,
        not_before=not_before,
        failures=failures,
        outcome=outcome,
    )


def end_delivery(
    session: Session,
    lease: Lease,
    *,
    delivered: bool,
    failures: int,
    outcome: str,
    now: datetime,
) -> None:
    """The delivery was taken, or is given up: leased → done or dead."""
    state = ShardState.DONE if delivered else ShardState.DEAD
    _end(session, lease, state=state, failures=failures, outcome=outcome, ended_at=now)


def suspect(session: Session, lease: Lease, *, now: datetime) -> None:
    """The engine broke under several shards, and any of them may be why: leased → ready, and the
    death that is counted makes the next attempt run alone."""
    _end(session, lease, state=ShardState.READY, not_before=now, deaths=Shard.deaths + 1)


def _end(session: Session, lease: Lease, **values: object) -> None:
    ended = session.execute(
        update(lease.table)
        .where(_fence(lease))
        .values(lease_expires_at=None, **values)
        .returning(lease.table.id)
    ).scalar()
    if ended is None:
        raise LeaseLost(lease)


@dataclass(frozen=True, slots=True)
class NewShard:
    """A slice of a batch's lines, of one model, in the order in which they should run."""

    model: str
    lines: Sequence[int]
    cost: int
    failures: int = 0
    deaths: int = 0


def add_shards(
    session: Session, batch_id: UUID, shards: Iterable[NewShard], *, not_before: datetime
) -> int:
    """COPY shards in, behind those the batch has; answers how many. The batch must be locked.

    They stream: a batch of a million long lines has a million shards, and none is kept here.
    """
    first = session.execute(
        select(func.coalesce(func.max(Shard.ordinal) + 1, 0)).where(Shard.batch_id == batch_id)
    ).scalar_one()
    count = 0
    with driver(session).cursor() as cursor, cursor.copy(_COPY_SHARDS) as copy:
        for count, shard in enumerate(shards, start=1):
            place, lines = first + count - 1, list(shard.lines)
            what = (shard.model, lines, shard.cost, not_before, shard.failures, shard.deaths)
            copy.write_row((new_id(), batch_id, place, *what, ShardState.READY.value, 0))
    return count


_COPY_SHARDS = (
    "COPY shards (id, batch_id, ordinal, model, lines, cost, not_before, failures, deaths, state,"
    " attempt) FROM STDIN"
)


def reap(session: Session, now: datetime) -> list[Lease]:
    """Take back every claim whose lease has run out: leased → ready. Answers the lost claims."""
    return [lost for table in CLAIMABLE for lost in _reap(session, table, now)]


def _reap(session: Session, table: Claimable, now: datetime) -> list[Lease]:
    # A shard that was not let at the engine had no part in the death.
    died = case((Shard.begun, Shard.deaths + 1), else_=Shard.deaths)
    counted = {"deaths": died} if table is Shard else {}
    rows = session.execute(
        update(table)
        .where(
            table.id.in_(
                select(table.id)
                .where(table.state == ShardState.LEASED, table.lease_expires_at <= now)
                .with_for_update(skip_locked=True)
            )
        )
        .values(state=ShardState.READY, lease_expires_at=None, not_before=now, **counted)
        .returning(table.id, table.batch_id, table.attempt)
    )
    return [Lease(table=table, id=row[0], batch_id=row[1], attempt=row[2]) for row in rows]


def kill(session: Session, batch_id: UUID, *, leased_too: bool) -> None:
    """Make the batch's stages and shards unclaimable: → dead. The batch must be locked."""
    states = [ShardState.READY, ShardState.LEASED] if leased_too else [ShardState.READY]
    tables: tuple[type[Stage] | type[Shard], ...] = (Stage, Shard)
    for table in tables:
        session.execute(
            update(table)
            .where(table.batch_id == batch_id, table.state.in_(states))
            .values(state=ShardState.DEAD, lease_expires_at=None)
        )


def is_open(session: Session, batch_id: UUID, *, states: Sequence[ShardState]) -> bool:
    """Whether any stage or shard of the batch is in one of `states`."""
    return bool(
        session.execute(
            select(
                exists().where(Stage.batch_id == batch_id, Stage.state.in_(states))
                | exists().where(Shard.batch_id == batch_id, Shard.state.in_(states))
            )
        ).scalar_one()
    )


def runnable_models(session: Session, now: datetime) -> list[str]:
    """Models that have a shard to be claimed now."""
    return list(
        session.scalars(
            select(Shard.model)
            .join(Batch, Batch.id == Shard.batch_id)
            .where(runnable(now))
            .distinct()
            .order_by(Shard.model)
        )
    )


def deliveries_due(session: Session, now: datetime) -> bool:
    """Whether there is a delivery to be claimed now."""
    return bool(session.execute(select(exists().where(_due(now)))).scalar_one())


def ready_stages(session: Session, now: datetime) -> list[StageName]:
    """Names of stages that could be claimed now."""
    return list(
        session.scalars(
            select(Stage.name)
            .where(Stage.state == ShardState.READY, Stage.not_before <= now)
            .distinct()
        )
    )
