"""Does every endpoint hear of a batch's end, whatever fails in between, and nobody else of it?"""

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import openai
import pytest
import redis
import structlog
from openai.types.webhooks import (
    BatchCancelledWebhookEvent,
    BatchCompletedWebhookEvent,
    BatchExpiredWebhookEvent,
    BatchFailedWebhookEvent,
)
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from service.batch import BatchStatus, ShardState
from service.db import batches, queue, session, webhooks
from service.db.models import Project
from service.db.webhook_models import Delivery, WebhookEndpoint
from service.ids import Prefix, new_id, show
from service.outbound import Sender
from service.webhook import TRIED_FOR, EventType
from tests.pipeline import Pipeline, embedding_line
from tests.receiver import Received, Receiver, receiver
from tests.threads import running, wait_until
from worker import deliver, tick

CONTEXT = httpx.create_ssl_context()
SENDER = Sender(private_addresses=True, context=CONTEXT)
CLIENT = openai.OpenAI(api_key="none")


@pytest.fixture
def here() -> Iterator[Receiver]:
    with receiver() as listening:
        yield listening


@dataclass(frozen=True)
class Hooks:
    """A project's endpoints, and what was to be told them."""

    pipeline: Pipeline

    def register(
        self, url: str, events: Sequence[EventType] = tuple(EventType), project: UUID | None = None
    ) -> tuple[UUID, str]:
        """An endpoint and its secret."""
        with self.pipeline.resources.database.transaction() as transaction:
            endpoint, secret = webhooks.create(
                transaction,
                project_id=project or self.pipeline.project_id,
                name="test",
                url=url,
                event_types=events,
                now=session.now(transaction),
            )
            return endpoint.id, secret

    def rotate(self, endpoint_id: UUID, *, keep_old: bool) -> str:
        with self.pipeline.resources.database.transaction() as transaction:
            endpoint = webhooks.lock(transaction, self.pipeline.project_id, endpoint_id)
            assert endpoint is not None
            now = session.now(transaction)
            return webhooks.rotate(transaction, endpoint, keep_old=keep_old, now=now)

    def remove(self, endpoint_id: UUID) -> None:
        with self.pipeline.resources.database.transaction() as transaction:
            assert webhooks.remove(transaction, self.pipeline.project_id, endpoint_id)

    def end_batch(self, status: BatchStatus = BatchStatus.COMPLETED) -> UUID:
        """A batch, brought to its end by the stages."""
        match status:
            case BatchStatus.FAILED:
                batch_id = self.pipeline.submit([b"no JSON"])
            case BatchStatus.CANCELLED:
                batch_id = self.pipeline.submit([embedding_line("a")])
                self.pipeline.cancel(batch_id)
            case BatchStatus.EXPIRED:
                batch_id = self.pipeline.submit([embedding_line("a")])
                self.pipeline.expire(batch_id)
            case _:
                batch_id = self.pipeline.submit([embedding_line("a")])
        self.pipeline.run()
        assert self.pipeline.batch(batch_id).status is status
        return batch_id

    def fail_batches(self, number: int) -> list[UUID]:
        """The quickest end."""
        ids = [self.pipeline.submit([b"no JSON"]) for _ in range(number)]
        self.pipeline.validate()
        return ids

    def deliver(self, sender: Sender = SENDER, name: str | None = None) -> None:
        """What the task does, in a worker of that name."""
        resources = self.pipeline.resources
        deliver.deliver(replace(resources, name=name or resources.name), sender)

    def rows(self) -> list[Delivery]:
        with self.pipeline.resources.database.transaction() as transaction:
            return list(transaction.scalars(select(Delivery).order_by(Delivery.id)))

    def row(self) -> Delivery:
        (only,) = self.rows()
        return only

    def change(self, **values: Any) -> None:
        """Of every delivery."""
        with self.pipeline.resources.database.transaction() as transaction:
            transaction.execute(update(Delivery).values(**values))

    def skip_wait(self) -> None:
        """The backoff is over."""
        self.change(not_before=text("clock_timestamp()"))

    def lose_worker(self) -> None:
        """The worker that had it was not heard of for a lease, and the tick has noticed."""
        self.change(lease_expires_at=text("clock_timestamp()"))
        tick.reap(self.pipeline.resources.database)

    def age(self, by: timedelta) -> None:
        """All of it happened so long before."""
        self.change(
            created_at=Delivery.created_at - by,
            ended_at=Delivery.ended_at - by,
            not_before=Delivery.not_before - by,
        )


@pytest.fixture
def hooks(pipeline: Pipeline) -> Hooks:
    return Hooks(pipeline)


def told(received: Received) -> tuple[str, str]:
    """The event's type, and the batch's id."""
    body = json.loads(received.body)
    return body["type"], body["data"]["id"]


@pytest.mark.parametrize(
    ("status", "event"),
    [
        (BatchStatus.COMPLETED, BatchCompletedWebhookEvent),
        (BatchStatus.FAILED, BatchFailedWebhookEvent),
        (BatchStatus.EXPIRED, BatchExpiredWebhookEvent),
        (BatchStatus.CANCELLED, BatchCancelledWebhookEvent),
    ],
)
def test_the_official_client_unwraps_what_every_end_sends(
    hooks: Hooks, here: Receiver, status: BatchStatus, event: type
) -> None:
    _, secret = hooks.register(f"{here.url}/hook")
    batch_id = hooks.end_batch(status)
    hooks.deliver()
    (received,) = here.received
    found = CLIENT.webhooks.unwrap(received.body, received.headers, secret=secret)
    assert isinstance(found, event)
    batch = hooks.pipeline.batch(batch_id)
    ended_at = getattr(batch, f"{status}_at")
    assert found.to_dict() == {
        "id": found.id,
        "object": "event",
        "type": f"batch.{status}",
        "created_at": int(ended_at.timestamp()),
        "data": {"id": show(Prefix.BATCH, batch_id)},
    }
    assert found.id.startswith("evt_")
    assert received.headers["webhook-id"].startswith("wh_")
    assert received.headers["content-type"] == "application/json"
    assert (hooks.row().state, hooks.row().outcome) == (ShardState.DONE, "200")
    hooks.deliver()
    assert len(here.received) == 1


def test_a_repetition_has_the_same_id_and_body_and_is_stamped_and_signed_anew(
    hooks: Hooks, here: Receiver
) -> None:
    _, secret = hooks.register(here.url)
    hooks.fail_batches(1)
    here.answers += [500, 302, 404]
    for number in range(4):
        hooks.deliver()
        assert len(here.received) == number + 1
        hooks.deliver()  # not due before its time
        assert len(here.received) == number + 1
        # Older than the client takes a stamp to be good for.
        hooks.age(timedelta(hours=1))
        hooks.skip_wait()
    assert {each.headers["webhook-id"] for each in here.received} == {
        show(Prefix.DELIVERY, hooks.row().id)
    }
    stamps = [int(each.headers["webhook-timestamp"]) for each in here.received]
    assert stamps == sorted(stamps)
    for each in here.received:
        assert told(each)[0] == "batch.failed"
        CLIENT.webhooks.unwrap(each.body, each.headers, secret=secret)
    row = hooks.row()
    assert (row.state, row.attempt, row.failures, row.outcome) == (ShardState.DONE, 4, 3, "200")


def test_a_dead_server_is_tried_for_a_day_and_then_given_up(hooks: Hooks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hooks.register(f"http://127.0.0.1:{taken.getsockname()[1]}/")
        hooks.fail_batches(1)
        waits = []
        for _ in range(3):
            hooks.deliver()
            row = hooks.row()
            assert (row.state, row.outcome) == (ShardState.READY, "connection_failed")
            with hooks.pipeline.resources.database.transaction() as transaction:
                waits.append(row.not_before - session.now(transaction))
            hooks.skip_wait()
        assert waits[0] < waits[2]
        hooks.age(TRIED_FOR)
        hooks.deliver()
        row = hooks.row()
        assert (row.state, row.failures) == (ShardState.DEAD, 4)
        assert row.ended_at is not None


def test_a_delivery_whose_workers_were_always_lost_is_given_up_by_the_clock(hooks: Hooks) -> None:
    hooks.register("http://127.0.0.1:9/")
    hooks.fail_batches(1)
    hooks.age(TRIED_FOR)
    tick.sweep_deliveries(hooks.pipeline.resources.database)
    assert hooks.row().state is ShardState.READY  # never tried: nobody was there to do it
    hooks.change(attempt=1)
    tick.sweep_deliveries(hooks.pipeline.resources.database)
    assert hooks.row().state is ShardState.DEAD


def test_what_ended_a_week_ago_is_forgotten(hooks: Hooks, here: Receiver) -> None:
    hooks.register(here.url)
    hooks.fail_batches(1)
    hooks.deliver()
    tick.sweep_deliveries(hooks.pipeline.resources.database)
    assert hooks.row().state is ShardState.DONE
    hooks.age(webhooks.DELIVERIES_KEPT_FOR)
    tick.sweep_deliveries(hooks.pipeline.resources.database)
    assert hooks.rows() == []


def test_both_secrets_sign_for_a_day_after_a_rotation_that_keeps_the_old_one(
    hooks: Hooks, here: Receiver
) -> None:
    endpoint_id, old = hooks.register(here.url)
    middle = hooks.rotate(endpoint_id, keep_old=True)
    new = hooks.rotate(endpoint_id, keep_old=True)
    hooks.fail_batches(1)
    hooks.deliver()
    for secret in (old, middle, new):
        verify(here.received[0], secret)
    with hooks.pipeline.resources.database.transaction() as transaction:
        later = session.now(transaction) + webhooks.OLD_SECRET_VALID_FOR
        assert webhooks.secrets_of(transaction, endpoint_id, later) == [new]
    last = hooks.rotate(endpoint_id, keep_old=False)
    hooks.fail_batches(1)
    hooks.deliver()
    verify(here.received[1], last)
    for secret in (old, middle, new):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            verify(here.received[1], secret)


def verify(received: Received, secret: str) -> None:
    CLIENT.webhooks.verify_signature(received.body, received.headers, secret=secret)


def test_a_repetition_is_signed_by_the_secret_of_the_moment(hooks: Hooks, here: Receiver) -> None:
    endpoint_id, _ = hooks.register(here.url)
    hooks.fail_batches(1)
    here.answers += [500]
    hooks.deliver()
    new = hooks.rotate(endpoint_id, keep_old=False)
    hooks.skip_wait()
    hooks.deliver()
    verify(here.received[1], new)


def test_only_endpoints_of_the_project_that_listen_hear_of_it(hooks: Hooks, here: Receiver) -> None:
    stranger = new_id()
    with hooks.pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        transaction.add(Project(id=stranger, name="stranger", created_at=now))
    hooks.register(f"{here.url}/all")
    hooks.register(f"{here.url}/failed", [EventType.FAILED])
    hooks.register(f"{here.url}/completed", [EventType.COMPLETED, EventType.EXPIRED])
    hooks.register(f"{here.url}/stranger", project=stranger)
    hooks.fail_batches(1)
    hooks.deliver()
    assert sorted(each.path for each in here.received) == ["/all", "/failed"]
    # One event, told twice.
    assert len({each.body for each in here.received}) == 1
    assert len({each.headers["webhook-id"] for each in here.received}) == 2


def test_an_endpoint_hears_of_no_end_before_it_was_registered(hooks: Hooks, here: Receiver) -> None:
    hooks.fail_batches(1)
    hooks.register(here.url)
    assert hooks.rows() == []


def test_a_deleted_endpoint_hears_nothing_more(hooks: Hooks, here: Receiver) -> None:
    endpoint_id, _ = hooks.register(here.url)
    hooks.fail_batches(1)
    hooks.remove(endpoint_id)
    hooks.fail_batches(1)
    hooks.deliver()
    assert (here.received, hooks.rows()) == ([], [])


def test_an_endpoint_may_be_deleted_while_it_is_called(hooks: Hooks, here: Receiver) -> None:
    endpoint_id, _ = hooks.register(f"{here.url}/slow")
    hooks.fail_batches(1)
    with running(hooks.deliver):
        wait_until(lambda: len(here.received) == 1)
        hooks.remove(endpoint_id)
        here.gate.set()
    assert hooks.rows() == []


def test_an_end_that_is_rolled_back_is_told_nobody(hooks: Hooks, here: Receiver) -> None:
    hooks.register(here.url)
    batch_id = hooks.pipeline.submit([embedding_line("a")])
    database = hooks.pipeline.resources.database

    def end_and_fall() -> None:
        with database.transaction() as transaction:
            now = session.now(transaction)
            batches.fail(transaction, batch_id, errors=[], error_count=0, now=now)
            count = select(Delivery.id)
            assert len(transaction.scalars(count).all()) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end_and_fall()
    assert hooks.rows() == []


def test_an_endpoint_being_deleted_as_a_batch_ends_keeps_neither_from_it(
    hooks: Hooks, here: Receiver
) -> None:
    endpoint_id, _ = hooks.register(here.url)
    batch_id = hooks.pipeline.submit([b"no JSON"])
    with hooks.pipeline.resources.database.transaction() as transaction:
        assert webhooks.remove(transaction, hooks.pipeline.project_id, endpoint_id)
        # Waits for the deletion, and then finds nobody to tell.
        with running(hooks.pipeline.validate):
            wait_until(lambda: waiting(hooks) == 1)
            transaction.commit()
    assert hooks.pipeline.batch(batch_id).status is BatchStatus.FAILED
    assert hooks.rows() == []


def waiting(hooks: Hooks) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    with hooks.pipeline.resources.database.transaction() as transaction:
        locks = text(f"{query} AND wait_event_type = 'Lock'")
        return int(transaction.execute(locks).scalar_one())


def test_a_crash_between_sending_and_recording_sends_again_under_the_same_id(
    hooks: Hooks, here: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = hooks.register(here.url)
    hooks.fail_batches(1)

    def away(*_: object, **__: object) -> None:
        raise OperationalError("", {}, Exception("the database is away"))

    with monkeypatch.context() as broken:
        broken.setattr(queue, "end_delivery", away)
        with pytest.raises(OperationalError):
            hooks.deliver()
    assert hooks.row().state is ShardState.LEASED
    hooks.deliver()
    assert len(here.received) == 1  # the lease stands
    hooks.lose_worker()
    hooks.deliver()
    first, second = here.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    verify(second, secret)
    assert (hooks.row().state, hooks.row().attempt) == (ShardState.DONE, 2)


def test_an_attempt_that_was_reaped_records_nothing(hooks: Hooks, here: Receiver) -> None:
    hooks.register(f"{here.url}/slow")
    hooks.fail_batches(1)
    with running(hooks.deliver):
        wait_until(lambda: len(here.received) == 1)
        hooks.lose_worker()
        hooks.change(not_before=text("clock_timestamp() + interval '1 hour'"))
        here.gate.set()
    row = hooks.row()
    assert (row.state, row.attempt, row.outcome) == (ShardState.READY, 1, None)


def test_workers_at_the_same_moment_send_each_delivery_once(hooks: Hooks, here: Receiver) -> None:
    for path in ("/a", "/b", "/c"):
        hooks.register(f"{here.url}{path}")
    ids = hooks.fail_batches(12)
    start = threading.Barrier(4)

    def work(name: str) -> None:
        start.wait(20)
        hooks.deliver(name=name)

    with running(*(lambda name=name: work(name) for name in "wxyz")):
        pass
    hooks.deliver()
    sent = Counter((each.path, told(each)[1]) for each in here.received)
    assert sent == {
        (path, show(Prefix.BATCH, batch_id)): 1 for path in ("/a", "/b", "/c") for batch_id in ids
    }
    assert {row.state for row in hooks.rows()} == {ShardState.DONE}
    assert {row.attempt for row in hooks.rows()} == {1}


def test_a_worker_delivers_in_one_process_at_a_time(hooks: Hooks, here: Receiver) -> None:
    hooks.register(f"{here.url}/slow")
    hooks.fail_batches(deliver.PER_ENDPOINT)
    with running(hooks.deliver):
        wait_until(lambda: len(here.received) == deliver.PER_ENDPOINT)
        hooks.register(f"{here.url}/other")
        hooks.deliver()  # returns at once
        here.gate.set()


def test_a_slow_endpoint_holds_up_nobody_but_itself(hooks: Hooks, here: Receiver) -> None:
    hooks.register(f"{here.url}/slow")
    before = hooks.fail_batches(5)
    hooks.register(f"{here.url}/quick")
    after = hooks.fail_batches(3)
    with running(hooks.deliver):
        wait_until(lambda: len(here.at("/quick")) == 3)
        # What becomes due meanwhile is looked for meanwhile.
        after += hooks.fail_batches(2)
        wait_until(lambda: len(here.at("/quick")) == 5)
        assert len(here.at("/slow")) == deliver.PER_ENDPOINT
        here.gate.set()
    assert len(here.at("/slow")) == len(before) + len(after)
    assert {row.state for row in hooks.rows()} == {ShardState.DONE}


def test_first_tries_go_before_repetitions(hooks: Hooks) -> None:
    hooks.register("http://127.0.0.1:9/")
    hooks.fail_batches(1)
    hooks.change(failures=3)
    hooks.age(timedelta(hours=1))
    hooks.fail_batches(1)
    with hooks.pipeline.resources.database.transaction() as transaction:
        claimed = [
            queue.claim_delivery(
                transaction,
                worker="test",
                now=session.now(transaction),
                lease=timedelta(seconds=30),
                per_endpoint=2,
            )
            for _ in range(3)
        ]
    old, new = hooks.rows()
    assert [None if lease is None else lease.id for lease in claimed] == [new.id, old.id, None]


def test_a_private_address_is_not_called_by_default(hooks: Hooks, here: Receiver) -> None:
    port = here.url.rsplit(":", 1)[1]
    for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
        hooks.register(f"http://{host}:{port}/")
    hooks.fail_batches(1)
    hooks.deliver(Sender.open(private_addresses=False))
    assert here.received == []
    assert {row.outcome for row in hooks.rows()} == {"forbidden_address"}
    assert {row.state for row in hooks.rows()} == {ShardState.READY}


def test_a_delivery_that_makes_the_sender_crash_keeps_no_other_from_it(
    hooks: Hooks, here: Receiver
) -> None:
    hooks.register(f"{here.url}/good")
    bad, _ = hooks.register(f"{here.url}/bad")
    hooks.fail_batches(2)
    with hooks.pipeline.resources.database.transaction() as transaction:
        # No such row can be made through the API.
        broken = update(webhooks.WebhookSecret).where(webhooks.WebhookSecret.endpoint_id == bad)
        transaction.execute(broken.values(secret="whsec_not base64"))
    hooks.deliver()
    assert [each.path for each in here.received] == ["/good"] * 2
    outcomes = Counter((row.state, row.outcome) for row in hooks.rows())
    assert outcomes == {(ShardState.DONE, "200"): 2, (ShardState.READY, "internal_error"): 2}


def test_neither_secret_nor_url_reaches_the_log(hooks: Hooks, here: Receiver) -> None:
    _, secret = hooks.register(f"{here.url}/hook/token?key=word")
    hooks.fail_batches(1)
    here.answers += [500]
    with structlog.testing.capture_logs() as logged:
        hooks.deliver()
        hooks.skip_wait()
        hooks.deliver()
    assert [(each["state"], each["outcome"], each["attempt"]) for each in logged] == [
        (ShardState.READY, 500, 1),
        (ShardState.DONE, 200, 2),
    ]
    shown = repr(logged)
    for hidden in (secret, secret.removeprefix("whsec_"), "token", "word", here.url):
        assert hidden not in shown
    with hooks.pipeline.resources.database.transaction() as transaction:
        letter = webhooks.letter(transaction, hooks.row().id, session.now(transaction))
        assert secret not in repr(letter)
        assert "token" not in repr(letter)


def test_the_tick_wakes_a_worker_for_what_is_due_and_for_nothing_else(
    hooks: Hooks, here: Receiver
) -> None:
    hooks.register(here.url)
    hooks.fail_batches(1)
    url = hooks.pipeline.resources.settings.redis_url.get_secret_value()
    with redis.Redis.from_url(url) as broker:
        for due in (True, False):
            broker.flushall()
            tick.tick(hooks.pipeline.resources)
            messages = [json.loads(each) for each in broker.lrange("cpu", 0, -1)]
            assert [each["headers"]["task"] for each in messages] == ["halfrate.deliver"] * due
            hooks.deliver()
        broker.flushall()


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("UPDATE webhook_deliveries SET state = 'leased'", "ck_webhook_deliveries_leased"),
        ("UPDATE webhook_deliveries SET state = 'done'", "ck_webhook_deliveries_ended"),
        ("UPDATE webhook_deliveries SET state = 'odd'", "ck_webhook_deliveries_state"),
        ("UPDATE webhook_deliveries SET event_type = 'a'", "ck_webhook_deliveries_event_type"),
        ("UPDATE webhook_endpoints SET event_types = '{}'", "ck_webhook_endpoints_event_types"),
        (
            "INSERT INTO webhook_secrets SELECT gen_random_uuid(), endpoint_id, 'b', NULL"
            " FROM webhook_secrets",
            "uq_webhook_secrets_current",
        ),
        (
            "INSERT INTO webhook_deliveries (id, endpoint_id, batch_id, event_id, event_type,"
            " created_at, state, attempt, not_before, failures) SELECT gen_random_uuid(),"
            " endpoint_id, batch_id, event_id, event_type, created_at, state, attempt, not_before,"
            " failures FROM webhook_deliveries",
            "uq_webhook_deliveries_endpoint_id_batch_id_event_type",
        ),
    ],
)
def test_the_database_refuses_rows_that_cannot_be(
    hooks: Hooks, statement: str, constraint: str
) -> None:
    hooks.register("http://127.0.0.1:9/")
    hooks.fail_batches(1)

    def change() -> None:
        with hooks.pipeline.resources.database.transaction() as transaction:
            transaction.execute(text(statement))

    with pytest.raises(IntegrityError, match=constraint):
        change()


def test_a_url_changed_before_a_delivery_is_where_it_goes(hooks: Hooks, here: Receiver) -> None:
    hooks.register(f"{here.url}/old")
    hooks.fail_batches(1)
    with hooks.pipeline.resources.database.transaction() as transaction:
        transaction.execute(update(WebhookEndpoint).values(url=f"{here.url}/new"))
    hooks.deliver()
    assert [each.path for each in here.received] == ["/new"]
