"""Is a webhook signed as the official client verifies it, and tried again for a day?"""

import time
from datetime import UTC, datetime, timedelta

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.webhooks import BatchCompletedWebhookEvent

from service.batch import TERMINAL
from service.webhook import (
    EVENT_OF,
    FIRST_DELAY,
    LONGEST_DELAY,
    TRIED_FOR,
    EventType,
    event_body,
    headers,
    hint,
    new_secret,
    next_try,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLIENT = openai.OpenAI(api_key="none")


def test_every_terminal_status_has_its_event() -> None:
    assert set(EVENT_OF) == TERMINAL
    assert {f"batch.{status}" for status in TERMINAL} == set(EventType)


def test_the_official_client_unwraps_it() -> None:
    secret = new_secret()
    body = event_body("evt_1", EventType.COMPLETED, NOW, "batch_1")
    sent_at = datetime.fromtimestamp(time.time_ns() / 1e9, UTC)
    signed = headers("wh_1", body, sent_at=sent_at, signed_with=[secret])
    event = CLIENT.webhooks.unwrap(body, signed, secret=secret)
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert event.to_dict() == {
        "id": "evt_1",
        "object": "event",
        "type": "batch.completed",
        "created_at": int(NOW.timestamp()),
        "data": {"id": "batch_1"},
    }
    for wrong in (secret[:-1] + ("A" if secret[-1] != "A" else "B"), new_secret()):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            CLIENT.webhooks.unwrap(body, signed, secret=wrong)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        CLIENT.webhooks.unwrap(body + b" ", signed, secret=secret)


def test_the_signature_is_the_standards_own_example() -> None:
    """The example of the specification's reference libraries."""
    signed = headers(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        b'{"test": 2432232314}',
        sent_at=datetime.fromtimestamp(1_614_265_330, UTC),
        signed_with=["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
    )
    assert signed["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_each_secret_signs() -> None:
    old, new = new_secret(), new_secret()
    body = event_body("evt_1", EventType.FAILED, NOW, "batch_1")
    sent_at = datetime.fromtimestamp(time.time_ns() / 1e9, UTC)
    signed = headers("wh_1", body, sent_at=sent_at, signed_with=[new, old])
    for secret in (new, old):
        CLIENT.webhooks.verify_signature(body, signed, secret=secret)


def test_a_secret_is_shown_by_its_end_alone() -> None:
    secret = new_secret()
    assert new_secret() != secret
    assert secret.startswith("whsec_")
    assert "=" not in secret
    assert hint(secret) == f"whsec_…{secret[-4:]}"


@given(failures=st.integers(1, 200), luck=st.floats(0, 1, exclude_max=True))
def test_a_delay_doubles_up_to_an_hour_and_loses_at_most_half(failures: int, luck: float) -> None:
    at = next_try(failures, created_at=NOW, now=NOW, luck=luck)
    assert at is not None
    whole = (
        min(FIRST_DELAY * 2 ** (failures - 1), LONGEST_DELAY) if failures < 16 else LONGEST_DELAY
    )
    assert whole / 2 <= at - NOW <= whole


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=200, max_size=200))
def test_it_is_tried_for_a_day_and_then_given_up(lucks: list[float]) -> None:
    now, tries = NOW, 1
    for failures, luck in enumerate(lucks, 1):
        at = next_try(failures, created_at=NOW, now=now, luck=luck)
        if at is None:
            break
        assert now < at <= NOW + TRIED_FOR
        now, tries = at, tries + 1
    assert at is None
    assert now > NOW + TRIED_FOR - LONGEST_DELAY
    assert 30 <= tries <= 70


def test_a_delay_beyond_the_day_is_the_end() -> None:
    late = NOW + TRIED_FOR - timedelta(seconds=1)
    assert next_try(1, created_at=NOW, now=late, luck=0) is None
