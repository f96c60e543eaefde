"""Does attention over a pack equal that of each sequence alone, written out?"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model import attention
from engine.model.attention import Pack, attend

CPU = torch.device("cpu")
LENGTHS = [200, 70, 70, 9, 9, 9, 4, 1]  # the first is long enough for the flash kernel
ROWS = sum(LENGTHS) + 4  # four belong to nobody
HEADS, DIM, WIDER = 4, 8, 12


def slowly(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, **asked: Any
) -> list[Tensor]:
    """[length, heads, dim] of each sequence, one head after the other in float64."""
    made = []
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        start += length
        places = torch.arange(length)
        distance = places[:, None] - places
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // key.shape[1])
            q, k, v = query[0, head, part], key[0, shared, part], value[0, shared, part]
            scores = q.double() @ k.double().T * asked.get("scaling", DIM**-0.5)
            if asked.get("softcap"):
                scores = torch.tanh(scores / asked["softcap"]) * asked["softcap"]
            if asked.get("position_bias") is not None:
                scores = scores + asked["position_bias"][0, head, :length, :length].double()
            if asked.get("sliding_window"):
                scores[distance.abs() >= asked["sliding_window"]] = float("-inf")
            if causal:
                scores[distance < 0] = float("-inf")
            if asked.get("s_aux") is not None:
                sink = asked["s_aux"][head].double().expand(length, 1)
                weights = torch.cat([scores, sink], dim=1).softmax(dim=1)[:, :-1]
            else:
                weights = scores.softmax(dim=1)
            heads.append(weights @ v.double())
        made.append(torch.stack(heads, dim=1).float())
    return made


def drawn(key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    query = torch.randn(1, ROWS, HEADS, DIM).transpose(1, 2)  # strided as models make them
    key = torch.randn(1, key_heads, ROWS, DIM)
    value = torch.randn(1, ROWS, key_heads, WIDER).transpose(1, 2)
    return query, key, value


def bias() -> Tensor:
    """By distance, as T5 has it."""
    distance = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    return torch.randn(HEADS, 2 * ROWS, generator=torch.Generator().manual_seed(1))[
        :, distance + ROWS - 1
    ][None]


ASKED: list[dict[str, Any]] = [
    {},
    {"scaling": 0.7},
    {"sliding_window": 3},
    {"sliding_window": 75},
    {"softcap": 1.5},
    {"s_aux": torch.tensor([0.1, -1.0, 2.0, 0.0])},
    {"position_bias": bias()},
    {"softcap": 0.8, "sliding_window": 5, "s_aux": torch.ones(4), "position_bias": bias()},
]


@pytest.mark.parametrize(
    ("asked", "causal", "key_heads"), list(itertools.product(ASKED, [False, True], [1, 2, 4]))
)
def test_each_sequence_attends_to_itself_alone(
    asked: dict[str, Any], causal: bool, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MOST_SCORES", {"cpu": 9 * 9 * HEADS * 2})  # runs in pieces
    query, key, value = drawn(key_heads)
    pack = Pack.of(LENGTHS, CPU)
    module = SimpleNamespace(is_causal=causal)
    found, _ = attend(module, query, key, value, None, pack=pack, **asked)
    assert found.shape == (1, ROWS, HEADS, WIDER)
    expected = torch.cat(slowly(query, key, value, causal=causal, **asked))
    torch.testing.assert_close(found[0, : len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert not found[0, len(expected) :].any()
    assert pack.callers == [module]


@pytest.mark.parametrize("dim", [8, 10, 26])  # 26 is that of TinyBERT; not all are multiples of 4
@pytest.mark.parametrize("length", [5, 33, 200])
def test_a_sequence_has_the_same_bytes_alone_and_among_others(dim: int, length: int) -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 7 * length, HEADS, dim).transpose(1, 2) for _ in range(3))
    module = SimpleNamespace(is_causal=False)
    among, _ = attend(module, query, key, value, None, pack=Pack.of([length] * 7, CPU))
    for own in (slice(n * length, (n + 1) * length) for n in range(7)):
        parts = (t.transpose(1, 2)[:, own].clone().transpose(1, 2) for t in (query, key, value))
        alone, _ = attend(module, *parts, None, pack=Pack.of([length], CPU))
        assert torch.equal(alone[0], among[0, own])


@pytest.mark.parametrize(
    "unknown", [{"attention_mask": torch.ones(1, 1, 1, 1)}, {"dropout": 0.1}, {"head_mask": [1]}]
)
def test_what_it_does_not_honour_is_refused(unknown: dict[str, Any]) -> None:
    tensors = drawn(4)
    mask = unknown.pop("attention_mask", None)
    with pytest.raises(ValueError, match="cannot honour"):
        attend(
            SimpleNamespace(is_causal=False), *tensors, mask, pack=Pack.of(LENGTHS, CPU), **unknown
        )


def test_a_layer_that_was_handed_no_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="no pack"):
        attend(SimpleNamespace(is_causal=False), *drawn(4), None)


def test_runs_are_neighbours_of_equal_length() -> None:
    runs = Pack.of([7, 7, 3, 3, 3, 7], CPU).runs
    assert [(run.start, run.count, run.length, run.end) for run in runs] == [
        (0, 2, 7, 14),
        (14, 3, 3, 23),
        (23, 1, 7, 30),
    ]
