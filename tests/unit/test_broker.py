"""Does the beat keep its rhythm whatever the host's clock is set to?"""

from datetime import UTC, datetime, timedelta

from celery.schedules import schedule

from worker.broker import steady


def test_the_beat_counts_seconds_that_nobody_sets_back() -> None:
    passed = [0.0]
    tick = schedule(timedelta(seconds=2), nowfun=steady(lambda: passed[0]))
    last = tick.now()
    assert not tick.is_due(last).is_due
    passed[0] = 1.9
    assert not tick.is_due(last).is_due
    passed[0] = 2.1
    assert tick.is_due(last).is_due


def test_steady_time_begins_as_the_clock_of_the_host() -> None:
    before = datetime.now(UTC)
    assert before <= steady(lambda: 5.0)() <= datetime.now(UTC)
