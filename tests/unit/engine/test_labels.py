"""Are labels as likely as a full forward over prompt and label says?"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate.labels import Fork, LabelTree
from engine.request import GenerateRequest, Generation, Sampling
from tests.unit.engine.conftest import END

MakeDecoder = Callable[[str], Path]
LABELS = [(70, 71, 72), (70, 71, 90), (70, 80), (75, 3, 4, 5), (75, 3), (70, 71)]
PROMPT = tuple(range(40, 61))


def requests(prompt: tuple[int, ...], tree: LabelTree) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            n,
            (*prompt, *tree.stem, *fork.tokens),
            Sampling(max_tokens=1, temperature=0.0, candidates=fork.candidates),
        )
        for n, fork in enumerate(tree.forks)
    ]


def scores(engine: Engine, prompt: tuple[int, ...], tree: LabelTree) -> list[float]:
    found: dict[int, Sequence[float]] = {}
    for index, result in engine.run(requests(prompt, tree)):
        assert isinstance(result, Generation)
        found[index] = result.candidates
    return tree.logprobs([found[n] for n in range(len(found))])


def reference(folder: Path, prompt: tuple[int, ...], label: tuple[int, ...], said: int) -> float:
    """A label's log probability behind the prompt and its first `said` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *label]])).logits[0].double()
    steps = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return float(sum(steps[n, token] for n, token in enumerate(label) if n >= said))


@pytest.mark.parametrize("path", ["packed", "padded"])
def test_labels_are_as_likely_as_a_full_forward_says(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    if path == "padded":
        monkeypatch.setattr("engine.engine.continuous_forward", lambda *_, **__: None)
    folder = make_decoder("llama")
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE))
    assert engine.status.path == path
    found = scores(engine, PROMPT, LabelTree.of(LABELS, END))
    # A label that is the beginning of another ends with the token that ends a text.
    written = [*LABELS[:4], (*LABELS[4], END), (*LABELS[5], END)]
    expected = [reference(folder, PROMPT, label, said=0) for label in written]
    assert found == pytest.approx(expected, abs=5e-3)
    assert max(range(6), key=lambda n: found[n]) == max(range(6), key=lambda n: expected[n])


def test_what_all_labels_begin_with_counts_as_said(make_decoder: MakeDecoder) -> None:
    folder = make_decoder("llama")
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE))
    labels = [(9, 8, 7, 60), (9, 8, 7, 61), (9, 8, 99)]
    tree = LabelTree.of(labels, END)
    assert tree.stem == (9, 8)
    expected = [reference(folder, PROMPT, label, said=2) for label in labels]
    assert scores(engine, PROMPT, tree) == pytest.approx(expected, abs=5e-3)


def test_labels_of_one_token_are_one_gather_and_need_no_decode(make_decoder: MakeDecoder) -> None:
    tree = LabelTree.of([(70,), (80,), (90,)], END)
    assert tree.forks == (Fork((), (70, 80, 90)),)
    engine = Engine(EngineConfig(model=make_decoder("llama"), kind=Kind.GENERATE))
    scores(engine, PROMPT, tree)
    counters = engine.counters
    assert (counters.steps, counters.padded_tokens) == (1, len(PROMPT))


def test_all_labels_are_one_prefill_of_the_prompt_and_their_inner_tokens(
    make_decoder: MakeDecoder,
) -> None:
    tree = LabelTree.of(LABELS, END)
    engine = Engine(EngineConfig(model=make_decoder("llama"), kind=Kind.GENERATE))
    scores(engine, PROMPT, tree)
    inner = {label[:n] for label in LABELS for n in range(len(label))} | {LABELS[4], LABELS[5]}
    assert len(tree.forks) == len(inner)
    assert (engine.counters.steps, engine.counters.decode_tokens) == (1, 0)
    # The prompt once; its last token by whoever asks what follows it.
    behind = sum(len(fork.tokens) + 1 for fork in tree.forks)
    assert engine.counters.padded_tokens <= len(PROMPT) + behind


LABEL = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)


@given(st.lists(LABEL, min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_a_tree_says_of_every_label_what_its_steps_say(
    labels: list[tuple[int, ...]], random: Callable[[], float]
) -> None:
    end = 9
    tree = LabelTree.of(labels, end)
    table: dict[tuple[tuple[int, ...], int], float] = {}
    found = []
    for fork in tree.forks:
        assert len(set(fork.candidates)) == len(fork.candidates)
        row = [math.log(random.random() + 1e-9) for _ in fork.candidates]  # type: ignore[attr-defined]  # hypothesis' Random
        table.update(
            {((*tree.stem, *fork.tokens), t): x for t, x in zip(fork.candidates, row, strict=True)}
        )
        found.append(row)
    assert len({fork.tokens for fork in tree.forks}) == len(tree.forks)
    for label, told in zip(labels, tree.logprobs(found), strict=True):
        assert label[: len(tree.stem)] == tree.stem
        longer = any(len(o) > len(label) and o[: len(label)] == label for o in labels)
        written = (*label, end) if longer else label
        steps = [table[written[:n], written[n]] for n in range(len(tree.stem), len(written))]
        assert told == pytest.approx(sum(steps))
