"""Which states can a batch and a shard be in, and which moves between them are legal?

validating ─▶ in_progress ─▶ finalizing ─▶ completed
    │ │ │         │   │
    │ │ └─▶ failed│   └─▶ expired
    │ └─▶ expired │
    └─▶ cancelling◀┘─▶ cancelled
"""

from collections.abc import Mapping
from enum import Enum, StrEnum


class BatchStatus(StrEnum):
    """The reference's eight words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class ShardState(StrEnum):
    """Of a shard, and of a stage of a batch: whatever is claimed under a lease."""

    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"


class LineState(StrEnum):
    """Of one request line. Only `pending` can change."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class StageName(StrEnum):
    """What a CPU worker does for a batch, in this order."""

    VALIDATE = "validate"
    PLAN = "plan"
    ASSEMBLE = "assemble"
    CLEAN = "clean"
    REMOVE = "remove"


class Ask(Enum):
    """What a batch asks of whoever holds work of it; learnt at each renewal and write-back."""

    GO_ON = "go on"
    PAUSE = "hand shards back; they are not to be claimed for now"
    CANCEL = "hand everything back; the batch is to end"


_B = BatchStatus
MOVES: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    _B.VALIDATING: frozenset({_B.IN_PROGRESS, _B.FAILED, _B.EXPIRED, _B.CANCELLING}),
    _B.IN_PROGRESS: frozenset({_B.FINALIZING, _B.EXPIRED, _B.CANCELLING}),
    _B.FINALIZING: frozenset({_B.COMPLETED}),
    _B.CANCELLING: frozenset({_B.CANCELLED}),
    _B.COMPLETED: frozenset(),
    _B.FAILED: frozenset(),
    _B.EXPIRED: frozenset(),
    _B.CANCELLED: frozenset(),
}

_S = ShardState
SHARD_MOVES: Mapping[ShardState, frozenset[ShardState]] = {
    _S.READY: frozenset({_S.LEASED, _S.DEAD}),
    _S.LEASED: frozenset({_S.READY, _S.DONE, _S.DEAD}),
    _S.DONE: frozenset(),
    _S.DEAD: frozenset(),
}

RUNNING = frozenset({_B.VALIDATING, _B.IN_PROGRESS})
"""While a batch is there to be run: it may be paused, and its window may end."""

TERMINAL = frozenset(status for status, after in MOVES.items() if not after)


def before(status: BatchStatus) -> frozenset[BatchStatus]:
    """The states from which `status` may be reached."""
    return frozenset(old for old, after in MOVES.items() if status in after)


def ask(status: BatchStatus, *, paused: bool) -> Ask:
    """What a batch in that state asks of its workers."""
    if status is BatchStatus.CANCELLING:
        return Ask.CANCEL
    return Ask.PAUSE if paused and status is BatchStatus.IN_PROGRESS else Ask.GO_ON


class IllegalMove(Exception):
    """The batch is not in a state from which it may move there."""

    def __init__(self, to: BatchStatus) -> None:
        super().__init__(f"no legal move to {to}")
        self.to = to
