"""How does an endpoint hear of a batch's end? By a signed POST, repeated until it answers 2xx.

At least once: claim in a transaction, send outside of any, record in another that names the
attempt. A worker that dies in between sends again, under the same webhook-id.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy.orm import Session

from service import webhook
from service.batch import ShardState
from service.db import queue, session, webhooks
from service.db.queue import Lease, LeaseLost
from service.db.webhooks import Letter
from service.ids import Prefix, show
from service.outbound import NotAnswered, Sender
from worker.resources import Resources
from worker.retry import luck

log = structlog.get_logger()

AT_ONCE = 64
"""Deliveries a worker has under way. They wait, so they cost next to nothing."""

PER_ENDPOINT = 2
"""Of one endpoint, so that all of one project's (`MAX_ENDPOINTS`) leave room for others."""

LOOK_EVERY_S = 0.5
"""While some are under way, others that have become due are looked for this often."""

THREADS = 3 * AT_ONCE
"""Started as they are needed: a name server that hangs holds one for longer than the deadline."""


def deliver(resources: Resources, sender: Sender) -> None:
    """Send what is due, until nothing is. One process of a worker does this at a time."""
    with resources.database.transaction() as transaction:
        if queue.delivers(transaction, worker=resources.name):
            return
    asyncio.run(_Round(resources, sender).run())


@dataclass(frozen=True, slots=True)
class _Sent:
    """How an attempt ended: an HTTP status, or why there was none."""

    lease: Lease
    letter: Letter
    outcome: int | str

    @property
    def taken(self) -> bool:
        return isinstance(self.outcome, int) and 200 <= self.outcome < 300


class _Round:
    """Everything that is due, many at once."""

    def __init__(self, resources: Resources, sender: Sender) -> None:
        self._resources = resources
        self._sender = sender

    async def run(self) -> None:
        """Returns when nothing is under way and nothing is due."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        under_way: set[asyncio.Task[_Sent]] = set()
        while True:
            free = AT_ONCE - len(under_way)
            for lease, letter in await asyncio.to_thread(self._claim, free):
                under_way.add(asyncio.create_task(self._send(lease, letter)))
            if not under_way:
                return
            ended, under_way = await asyncio.wait(
                under_way, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                await asyncio.to_thread(self._record, task.result())

    def _claim(self, most: int) -> list[tuple[Lease, Letter]]:
        resources = self._resources
        claimed: list[tuple[Lease, Letter]] = []
        # Longer than any attempt: nobody sends again what is still under way.
        held_for = resources.settings.lease + timedelta(seconds=self._sender.deadline_s)
        with resources.database.transaction() as transaction:
            now = session.now(transaction)
            while len(claimed) < most:
                lease = queue.claim_delivery(
                    transaction,
                    worker=resources.name,
                    now=now,
                    lease=held_for,
                    per_endpoint=PER_ENDPOINT,
                )
                if lease is None:
                    break
                claimed.append((lease, webhooks.letter(transaction, lease.id, now)))
        return claimed

    async def _send(self, lease: Lease, letter: Letter) -> _Sent:
        try:
            outcome: int | str = await post(self._sender, letter)
        except NotAnswered as error:
            outcome = error.why
        # The others' deliveries must go on, and this one must come to its end after 24 hours.
        except Exception:
            log.exception("delivery crashed", delivery=lease.id.hex)
            outcome = "internal_error"
        return _Sent(lease, letter, outcome)

    def _record(self, sent: _Sent) -> None:
        event = log.bind(delivery=sent.lease.id.hex, batch=sent.lease.batch_id.hex)
        try:
            with self._resources.database.transaction() as transaction:
                state = _record(transaction, sent, session.now(transaction))
        except LeaseLost:
            event.info("lease lost: reaped, or the endpoint is gone")
        else:
            event.info(
                "delivery tried", state=state, outcome=sent.outcome, attempt=sent.lease.attempt
            )


async def post(sender: Sender, letter: Letter) -> int:
    """Send it once, stamped and signed now. Answers the status. Raises NotAnswered."""
    body = webhook.event_body(
        show(Prefix.EVENT, letter.event_id),
        letter.event,
        letter.created_at,
        show(Prefix.BATCH, letter.batch_id),
    )
    message_id = show(Prefix.DELIVERY, letter.delivery_id)
    headers = webhook.headers(message_id, body, sent_at=letter.sent_at, signed_with=letter.secrets)
    return await sender.post(letter.url, body=body, headers=headers)


def _record(transaction: Session, sent: _Sent, now: datetime) -> ShardState:
    """The state that this attempt leaves behind. Raises LeaseLost."""
    letter, outcome = sent.letter, str(sent.outcome)
    failures = letter.failures if sent.taken else letter.failures + 1
    at = None
    if not sent.taken:
        at = webhook.next_try(failures, created_at=letter.created_at, now=now, luck=luck())
    if at is None:
        queue.end_delivery(
            transaction,
            sent.lease,
            delivered=sent.taken,
            failures=failures,
            outcome=outcome,
            now=now,
        )
        return ShardState.DONE if sent.taken else ShardState.DEAD
    queue.try_again(transaction, sent.lease, not_before=at, failures=failures, outcome=outcome)
    return ShardState.READY
