"""How does code that needs the time get it? It is handed a Clock.

What is stored or compared across machines (leases, windows, created_at) is stamped by Postgres's
clock (`service.db.session.now`), so that hosts with skewed clocks agree. A Clock is for durations
inside one process.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from an arbitrary zero, never going back."""

monotonic: Clock = time.monotonic
