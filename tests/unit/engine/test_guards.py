"""Does the encoder engine do as little work as it promises? Counted, on ragged texts, not timed."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import EncodeRequest
from engine.surface import Counters

LONGEST, BUDGET = 128, 2048


@pytest.fixture(scope="module")
def ragged() -> list[EncodeRequest]:
    """1,500 texts, as skewed as real ones: most are short, some reach the limit."""
    drawn = np.random.default_rng(11)
    lengths = np.clip(drawn.lognormal(3.3, 0.9, size=1500), 3, LONGEST).astype(int)
    return [
        EncodeRequest(index, tuple(drawn.integers(3, 250, size=length).tolist()))
        for index, length in enumerate(lengths)
    ]


def counted(folder: Path, asked: list[EncodeRequest], *, path: str) -> Counters:
    """What an engine did to answer all of them."""
    engine = Engine(
        EngineConfig(
            model=folder, kind=Kind.EMBED, context_length=LONGEST, token_budget=BUDGET, max_rows=64
        )
    )
    assert engine.status.path == path
    assert len(list(engine.run(asked))) == len(asked)
    return engine.counters


def test_packed_texts_have_no_padding_and_fill_every_step_but_the_last(
    tiny_encoder: Path, ragged: list[EncodeRequest]
) -> None:
    found = counted(tiny_encoder, ragged, path="packed")

    assert found.padded_tokens == found.input_tokens == sum(len(r.tokens) for r in ragged)
    assert found.rows == len(ragged)
    # A step ends where the next text would no longer fit, so less than one text's length is lost.
    assert found.steps <= found.input_tokens / (BUDGET - LONGEST) + 1


def test_the_fallback_pads_a_tenth_at_most_and_still_runs_many_rows_a_step(
    tiny_encoder: Path, ragged: list[EncodeRequest]
) -> None:
    with patch("engine.encode.probe._plug_in", return_value="asked for"):
        found = counted(tiny_encoder, ragged, path="padded")

    assert 0 < 1 - found.input_tokens / found.padded_tokens <= 0.10
    assert found.rows == len(ragged)
    assert found.rows / found.steps >= 16
