"""Which transactions wait for a worker that has stopped, while others wait for them?

A worker that is stalled in mid-transaction (its machine swaps, sleeps, is cut off) keeps its row
locks for as long as the kernel answers for it, whatever becomes of its claims. Ended here, the
transaction leaves nothing behind, and a worker that comes back finds its connection gone.
"""

from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

WORKERS = "halfrate worker "
"""How the names of workers' connections begin."""

# By Postgres's own clock, that of its statistics. Whoever has only read has no xid, and holds
# nothing up: an assembler's cursor may stand open for hours. A COPY always waits for its client,
# so it is hung only if somebody waits for it. Materialized, or Postgres might end a connection
# first and look at the rest of the conditions then.
_END = text(
    """
    WITH found AS MATERIALIZED (
        SELECT pid FROM pg_stat_activity AS hung
        WHERE datname = current_database() AND starts_with(application_name, :workers)
          AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'
          AND (
            (state = 'idle in transaction'
                AND state_change < pg_catalog.clock_timestamp() - CAST(:patience AS interval))
            OR (state = 'active'
                AND xact_start < pg_catalog.clock_timestamp() - CAST(:patience AS interval)
                AND EXISTS (
                    SELECT FROM pg_stat_activity AS waiting
                    WHERE wait_event_type = 'Lock'
                      AND hung.pid = ANY(pg_blocking_pids(waiting.pid))
                ))
          )
    )
    SELECT pg_terminate_backend(pid) FROM found
    """
)


def end(session: Session, patience: timedelta) -> int:
    """End the transactions of workers that have said nothing for so long; how many there were."""
    given = {"workers": WORKERS, "patience": patience}
    return len(session.connection().execute(_END, given).all())
