"""Do the kernels for CUDA devices read what each row alone would? In triton's interpreter."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.generate import triton_spans
from engine.generate.kv import Heads
from tests.gpu.spans import BOUNDS, Case, Text, check

pytestmark = pytest.mark.skipif(
    not triton_spans.INTERPRETED, reason="on a device, tests/gpu says it of the device itself"
)


@st.composite
def texts(draw: st.DrawFn) -> Text:
    before = draw(st.integers(0, 90))
    cuts = draw(st.sets(st.integers(1, before), max_size=3)) if before else set()
    return Text(before, draw(st.sampled_from([1, 1, 1, 2, 9, 40])), tuple(sorted(cuts)))


# Without shrinking: in the interpreter it takes minutes, and the case is printed as it is.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    texts=st.lists(texts(), min_size=1, max_size=4),
    heads=st.builds(
        Heads, st.integers(1, 3), st.sampled_from([8, 16, 24, 80]), st.sampled_from([8, 16, 40])
    ),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dtype=st.sampled_from(list(BOUNDS)),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.sampled_from([1.0, 5.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_read_what_they_see_and_nothing_else(
    texts: list[Text],
    heads: Heads,
    group: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    seed: int,
) -> None:
    check(Case(texts, heads, group, dtype, window, softcap, with_sinks, seed))


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_long_texts_are_read_in_splits(dtype: torch.dtype) -> None:
    check(Case([Text(1500, 1, (700, 701)), Text(600, 1), Text(511, 1)], Heads(1, 16, 16), 2, dtype))


@pytest.mark.parametrize("group", [1, 4])
def test_neighbours_room_and_programs_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """A row's splits are its own: not the number of programs, nor who else is in the step."""
    texts = [Text(1300, 1, (600,)), Text(513, 1), Text(40, 1, (7, 9)), Text(700, 1)]
    case = Case(texts, Heads(2, 16, 16), group, with_sinks=True, window=1100)
    together = case.attended()
    for programs in (1, 10**6):
        monkeypatch.setattr(triton_spans, "_PROGRAMS", programs)
        roomy = case.attended(spare=3)
        assert all(map(torch.equal, together, roomy))
    for n, text in enumerate(texts):
        alone = Case([text], case.heads, group, with_sinks=True, window=1100)
        for mine, theirs in ((alone.queries, case.queries), (alone.keys, case.keys)):
            mine[0] = theirs[n]
        alone.values[0], alone.sinks = case.values[n], case.sinks
        assert torch.equal(alone.attended()[0], together[n])


def test_a_group_larger_than_a_program_takes_is_shared_among_programs() -> None:
    check(Case([Text(20, 1), Text(9, 3)], Heads(1, 8, 8), 71))
