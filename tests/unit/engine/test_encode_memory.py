"""Does memory stay as it is, however many texts go through?"""

import gc
import os
from pathlib import Path

import pytest

from engine.config import EngineConfig, Kind
from engine.encode import loop
from engine.engine import Engine
from engine.memory import fitted
from engine.request import Embedding, EncodeRequest

TEXTS, SUBMITTED = 100_000, 2_000
MOST_GROWTH = 12 << 20  # bytes; one vector kept of each text would be 40 MiB


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_thousand_texts_leave_memory_as_it_was(
    tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STORE_BYTES", 1 << 20)  # so that it is full early on
    engine = Engine(EngineConfig(model=tiny_encoder, kind=Kind.EMBED))
    answered = 0
    most_in_a_step = 0
    settled = 0
    for start in range(0, TEXTS, SUBMITTED):
        engine.submit(
            EncodeRequest(n, (1, 40 + n % 90, 40 + n // 90 % 90, 40 + n // 8100, 2))
            for n in range(start, start + SUBMITTED)
        )
        while engine.pending:
            results = engine.step()
            assert all(isinstance(result, Embedding) for result in results)
            answered += len(results)
            most_in_a_step = max(most_in_a_step, len(results))
        if start == TEXTS // 5:
            settled = resident()
    assert answered == TEXTS
    assert most_in_a_step <= 4096 // 5  # they leave as they finish
    assert resident() - settled < MOST_GROWTH
    assert engine.counters.twins == 0


def test_bytes_are_fitted_by_tokens_and_by_pairs_of_tokens() -> None:
    samples = [
        (count * length, length, 1000 * count * length + 24 * count * length**2)
        for length in (128, 256, 512)
        for count in (1, 4)
    ]
    limit = fitted(samples, most=10**9)
    assert limit.per_token == pytest.approx(1000)
    assert limit.per_pair == pytest.approx(24)
    assert limit.allows(4096, 512)
    assert not limit.allows(100_000, 512)
    linear = fitted([(100, 100, 90_000), (400, 400, 300_000), (800, 800, 500_000)], most=None)
    assert (linear.per_token, linear.per_pair) == (pytest.approx(900), 0.0)
    assert linear.allows(10**9, 10**6)
