"""How do tests let something run beside them, and wait for what it does, without sleeping?"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 30


@contextmanager
def running(*targets: Callable[[], object]) -> Iterator[None]:
    """Each target in a thread of its own; the block ends when they have. Raises what they did."""
    raised: list[BaseException] = []

    def run(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in targets]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it did not end"
    if raised:
        raise raised[0]


def wait_until(true: Callable[[], bool]) -> None:
    """Poll with a deadline."""
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE_S, deadline.set)
    timer.start()
    try:
        while not true():
            assert not deadline.wait(0.02), "it did not come to that"
    finally:
        timer.cancel()
