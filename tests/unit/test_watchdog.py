"""Does what stands still end the worker, and nothing else?"""

import threading
import time

from worker.watchdog import POLLS, WARM_UP, Doing, Watchdog


class Ended(Exception):
    """Where the process would have ended."""


def fell() -> None:
    raise Ended


def looks_until_the_end(dog: Watchdog, most: int) -> int | None:
    for look in range(most):
        try:
            dog.look()
        except Ended:
            return look
    return None


def test_a_step_that_does_not_end_ends_the_worker() -> None:
    dog = Watchdog({"engine": lambda: Doing(7)}, limit_s=1, end=fell)
    assert looks_until_the_end(dog, 10 * POLLS) == POLLS + 1


def test_a_first_step_gets_more_time() -> None:
    dog = Watchdog({"engine": lambda: Doing(1, WARM_UP)}, limit_s=1, end=fell)
    assert looks_until_the_end(dog, 10 * POLLS) == WARM_UP * POLLS + 1


def test_steps_that_follow_each_other_may_go_on_for_ever() -> None:
    steps = iter(range(10**6))
    dog = Watchdog({"engine": lambda: Doing(next(steps))}, limit_s=1, end=fell)
    assert looks_until_the_end(dog, 10 * POLLS) is None


def test_an_idle_engine_may_idle_for_ever() -> None:
    dog = Watchdog({"engine": lambda: None}, limit_s=1, end=fell)
    assert looks_until_the_end(dog, 10 * POLLS) is None


def test_one_that_stands_still_is_found_beside_one_that_moves() -> None:
    steps = iter(range(10**6))
    watched = {"moves": lambda: Doing(next(steps)), "leases": lambda: Doing(3)}
    dog = Watchdog(watched, limit_s=1, end=fell)
    assert looks_until_the_end(dog, 10 * POLLS) == POLLS + 1


def test_the_thread_looks_by_itself() -> None:
    ended = threading.Event()
    with Watchdog({"engine": lambda: Doing(1)}, limit_s=0.05, end=ended.set):
        deadline = time.monotonic() + 30
        assert ended.wait(deadline - time.monotonic())
