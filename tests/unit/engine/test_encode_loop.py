"""Does the encode loop answer everybody once, whatever memory and numbers do?"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, Kind
from engine.encode.forward import Forward
from engine.encode.loop import EncodeLoop
from engine.encode.packed import Packed
from engine.encode.padded import Padded
from engine.encode.probe import probe
from engine.encode.texts import Asked, Text
from engine.engine import Engine
from engine.memory import Limit
from engine.model.load import Encoder, load_encoder
from engine.request import Embedding, EncodeRequest, Failure, FailureReason, Result
from engine.surface import Counters

PATHS = ["packed", "padded"]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=folder, kind=Kind.EMBED, **changes)


def ready(folder: Path, path: str, **changes: Any) -> Encoder:
    """The tiny encoder, set up for a path."""
    config = config_of(folder, **changes)
    encoder = load_encoder(config)
    if path == "packed":
        assert probe(encoder, config).forward.path == "packed"
    return encoder


class Moody:
    """A model whose output, or shortage of memory, `answer` decides."""

    def __init__(self, model: Any, answer: Callable[[Any, Any], Any]) -> None:
        self._model = model
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._answer(self._model, inputs)


def moody(encoder: Encoder, answer: Callable[[Any, Any], Any]) -> Encoder:
    return dataclasses.replace(encoder, model=Moody(encoder.model, answer))


def texts(lengths: list[int]) -> list[EncodeRequest]:
    return [
        EncodeRequest(n, tuple(40 + (n + i) % 90 for i in range(k))) for n, k in enumerate(lengths)
    ]


class Run:
    """A loop, and what it has answered."""

    def __init__(self, encoder: Encoder, path: str, limit: Limit = Limit()) -> None:  # noqa: B008 frozen
        forward: Forward = Packed(encoder) if path == "packed" else Padded(encoder, max_rows=64)
        ticks = itertools.count()
        self.loop = EncodeLoop(
            encoder,
            forward,
            kind=Kind.EMBED,
            token_budget=4096,
            limit=limit,
            clock=lambda: float(next(ticks)),
        )
        self.cost = Counters()
        self.results: dict[Any, Result] = {}

    @torch.inference_mode()
    def drain(self, requests: list[EncodeRequest]) -> dict[Any, Result]:
        self.loop.add(requests)
        wanted = len(self.results) + len(requests)
        for _ in range(500):
            outcome = self.loop.step()
            self.cost += outcome.cost
            for result in outcome.results:
                assert result.id not in self.results
                self.results[result.id] = result
            if len(self.results) == wanted:
                return self.results
        pytest.fail("the loop did not finish")


def drain(encoder: Encoder, path: str, requests: list[EncodeRequest]) -> dict[Any, Result]:
    return Run(encoder, path).drain(requests)


def vectors_of(results: dict[Any, Result]) -> np.ndarray:
    rows = []
    for _, result in sorted(results.items()):
        assert isinstance(result, Embedding)
        rows.append(result.vector)
    return np.stack(rows)


def short_of_memory(fails: Callable[[torch.Size], bool]) -> Callable[[Any, Any], Any]:
    def answer(model: Any, inputs: Any) -> Any:
        if fails(inputs["input_ids"].shape):
            msg = "injected"
            raise torch.OutOfMemoryError(msg)
        return model(**inputs)

    return answer


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_that_is_too_large_for_memory_is_cut(tiny_encoder: Path, path: str) -> None:
    encoder = ready(tiny_encoder, path)
    requests = texts([5 + n % 50 for n in range(60)])
    expected = vectors_of(drain(encoder, path, requests))
    sizes: list[int] = []

    def fails(shape: torch.Size) -> bool:
        sizes.append(shape.numel())
        return shape.numel() > 150

    run = Run(moody(encoder, short_of_memory(fails)), path)
    np.testing.assert_allclose(vectors_of(run.drain(requests)), expected, atol=1e-6)
    assert max(sizes) > 150
    failed = len([size for size in sizes if size > 150])
    assert 0 < failed < 25
    assert run.cost.out_of_memory == failed
    assert run.loop.token_budget <= 150


@pytest.mark.parametrize("path", PATHS)
def test_a_text_too_large_for_memory_even_alone_fails_alone(tiny_encoder: Path, path: str) -> None:
    encoder = ready(tiny_encoder, path)
    small = moody(encoder, short_of_memory(lambda shape: shape.numel() > 48))
    results = drain(small, path, texts([60, 5, 49, 40, 12]))
    failed = {n for n, result in results.items() if isinstance(result, Failure)}
    assert failed == {0, 2}
    for n in failed:
        result = results[n]
        assert isinstance(result, Failure)
        assert result.reason is FailureReason.OUT_OF_MEMORY


def poisoned(dtypes: set[torch.dtype]) -> Callable[[Any, Any], Any]:
    """Hidden states of token 41 come out NaN while the model is in one of these dtypes."""

    def answer(model: Any, inputs: Any) -> Any:
        output = model(**inputs)
        if model.dtype in dtypes:
            output.last_hidden_state[inputs["input_ids"] == 41] = float("nan")
        return output

    return answer


def only_one_with_41() -> list[EncodeRequest]:
    requests = [EncodeRequest(n, tuple(50 + (n + i) % 80 for i in range(9))) for n in range(4)]
    requests[1] = dataclasses.replace(requests[1], tokens=(41, *requests[1].tokens[1:]))
    return requests


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_overflows_is_run_again_in_float32_and_the_model_is_left_as_it_was(
    tiny_encoder: Path, path: str
) -> None:
    encoder = ready(tiny_encoder, path, dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in encoder.whole.state_dict().items()}
    expected = vectors_of(drain(encoder, path, only_one_with_41()))
    run = Run(moody(encoder, poisoned({torch.bfloat16})), path)
    found = vectors_of(run.drain(only_one_with_41()))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    np.testing.assert_allclose(found[1], expected[1], atol=0.05)
    assert (run.cost.non_finite, run.cost.padded_tokens) == (1, 45)
    after = encoder.whole.state_dict()
    assert all(
        torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_is_not_finite_in_float32_either_fails_alone(
    tiny_encoder: Path, path: str
) -> None:
    encoder = moody(ready(tiny_encoder, path), poisoned({torch.float32}))
    results = drain(encoder, path, only_one_with_41())
    failure = results[1]
    assert isinstance(failure, Failure)
    assert failure.reason is FailureReason.NON_FINITE
    assert all(isinstance(results[n], Embedding) for n in (0, 2, 3))


@pytest.mark.parametrize("path", PATHS)
def test_a_memory_limit_bounds_batches(tiny_encoder: Path, path: str) -> None:
    encoder = ready(tiny_encoder, path)
    shapes: list[int] = []

    def watch(model: Any, inputs: Any) -> Any:
        shapes.append(inputs["input_ids"].numel())
        return model(**inputs)

    limit = Limit(most=10_000, per_token=50, per_pair=2)
    requests = texts([5 + n % 50 for n in range(100)])
    Run(moody(encoder, watch), path, limit).drain(requests)
    assert max(shapes) < 10_000 / (50 + 2 * 5)
    assert len(shapes) < len(requests) * 2 / 3


@pytest.mark.parametrize("path", PATHS)
def test_work_is_shared_by_tokens_and_adds_up(tiny_encoder: Path, path: str) -> None:
    run = Run(ready(tiny_encoder, path), path)
    results = run.drain(texts([30, 29, 28, 10, 10]))
    works = {n: result.work for n, result in results.items() if isinstance(result, Embedding)}
    assert sum(work.computed_tokens for work in works.values()) == run.cost.padded_tokens
    assert run.cost.rows == 5
    if path == "packed":
        assert {n: work.computed_tokens for n, work in works.items()} == dict(
            enumerate([30, 29, 28, 10, 10])
        )
        assert sum(work.seconds for work in works.values()) == pytest.approx(1.0)
        assert works[0].seconds == pytest.approx(30 / 107)
        assert works[0].rows == 5


def test_twins_are_computed_once_and_answered_each(tiny_encoder: Path) -> None:
    run = Run(ready(tiny_encoder, "packed"), "packed")
    same = texts([20, 20, 9])
    twins = [dataclasses.replace(same[0], id=("twin", n)) for n in range(5)]
    other_half = dataclasses.replace(same[0], id="pair", first=4)
    results = run.drain([*same, *twins, other_half])
    assert (run.cost.rows, run.cost.twins) == (4, 5)
    works = [results[twin.id].work.computed_tokens for twin in twins]  # type: ignore[union-attr]  # no failures
    assert works == [0] * 5
    for twin in twins:
        np.testing.assert_array_equal(results[twin.id].vector, results[0].vector)  # type: ignore[union-attr]  # embeddings
    assert not np.array_equal(results["pair"].vector, results[0].vector)  # type: ignore[union-attr]  # embeddings

    later = run.drain([dataclasses.replace(same[0], id="later")])
    np.testing.assert_array_equal(later["later"].vector, results[0].vector)  # type: ignore[union-attr]  # embeddings
    assert (run.cost.rows, run.cost.twins) == (4, 6)


def test_a_twin_is_answered_though_the_request_that_came_first_is_aborted(
    tiny_encoder: Path,
) -> None:
    run = Run(ready(tiny_encoder, "packed"), "packed")
    [first] = texts([20])
    run.loop.add([first])
    run.loop.remove([first.id])
    assert run.loop.step().results == ()
    run.loop.add([first, dataclasses.replace(first, id="twin")])
    run.loop.remove([first.id])
    [result] = run.loop.step().results
    assert result.id == "twin"
    run.loop.add([dataclasses.replace(first, id="known")])
    run.loop.remove(["known"])
    assert run.loop.step().results == ()


def test_the_store_of_rows_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    asked = Asked(store_bytes=8 * (400 + 256))
    row = np.zeros(100, dtype=np.float32)
    requests = texts([10] * 20)
    for request in requests[:8]:
        [text] = asked.add([request])
        asked.settle(text, row)
    assert asked.add([dataclasses.replace(requests[0], id="again")]) == []  # now used last
    for request in requests[8:15]:
        [text] = asked.add([request])
        asked.settle(text, row)
    known = [
        n
        for n, request in enumerate(requests[:15])
        if not asked.add([dataclasses.replace(request, id=("once more", n))])
    ]
    assert known == [0, *range(8, 15)]
    [huge] = asked.add([EncodeRequest("huge", (1, 2))])
    asked.settle(huge, np.zeros(1000, dtype=np.float32))
    assert asked.add([EncodeRequest("huge again", (1, 2))]) != []


def test_texts_that_differ_are_never_taken_for_twins() -> None:
    alike = [
        EncodeRequest(0, (1, 2, 3)),
        EncodeRequest(1, (1, 2, 3), first=1),
        EncodeRequest(2, (1, 2, 3), first=2),
        EncodeRequest(3, (1, 2)),
        EncodeRequest(4, (3, 2, 1)),
    ]
    assert len({Text.of(request).id for request in alike}) == len(alike)
    assert Text.of(alike[0]) == Text.of(dataclasses.replace(alike[0], id=9, dimensions=8))


def test_results_leave_as_they_finish(tiny_encoder: Path) -> None:
    engine = Engine(config_of(tiny_encoder, token_budget=256))
    engine.submit(texts([40] * 60))
    first = engine.step()
    assert 0 < len(first) <= 256 // 40
    assert engine.pending == 60 - len(first)
