"""Does every engine keep the promises of the surface? The real one and the stub alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import Kind
from engine.errors import ModelLoadError
from engine.request import (
    Embedding,
    EncodeRequest,
    Failure,
    FailureReason,
    FinishReason,
    GenerateRequest,
    Generation,
    Request,
    Result,
    Sampling,
)
from engine.surface import EngineLike

MakeEngine = Callable[..., EngineLike]
KINDS = [Kind.EMBED, Kind.GENERATE]


def ask(kind: Kind, key: Any, length: int = 10, **sampling: Any) -> Request:
    tokens = tuple(40 + (7 * place + length) % 80 for place in range(length))
    if kind is Kind.EMBED:
        return EncodeRequest(key, tokens)
    settings = {"max_tokens": 4, "temperature": 0.0, **sampling}
    return GenerateRequest(key, tokens, Sampling(**settings))


def finish(engine: EngineLike) -> dict[Any, Result]:
    results: dict[Any, Result] = {}
    for _ in range(1000):
        if not engine.pending:
            return results
        for result in engine.step():
            assert result.id not in results
            results[result.id] = result
    pytest.fail("the engine did not finish")


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_gets_exactly_one_result(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    requests = [ask(kind, ("line", n), length=1 + n * 3 % 50) for n in range(40)]
    engine.submit(requests[:25])
    engine.submit(requests[25:])
    assert engine.pending == 40

    results = finish(engine)

    assert set(results) == {request.id for request in requests}
    expected = Embedding if kind is Kind.EMBED else Generation
    assert all(isinstance(result, expected) for result in results.values())
    assert engine.pending == 0


@pytest.mark.parametrize("kind", KINDS)
def test_run_yields_each_index_with_its_result(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    requests = [ask(kind, f"r{n}", length=1 + n) for n in range(20)]
    seen = dict(engine.run(requests))
    assert sorted(seen) == list(range(20))
    assert all(seen[index].id == requests[index].id for index in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_run_left_early_leaves_an_idle_engine(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind, max_rows=2)
    for _ in engine.run(ask(kind, n, length=20) for n in range(10)):
        break
    assert engine.pending == 0
    assert len(list(engine.run([ask(kind, 0)]))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_run_refuses_an_engine_that_is_not_idle(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    engine.submit([ask(kind, "before")])
    with pytest.raises(ValueError, match="idle"):
        list(engine.run([ask(kind, "after")]))
    assert set(finish(engine)) == {"before"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_work_returns_nothing(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    assert engine.step() == []
    engine.submit([])
    assert engine.step() == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_in_flight_cannot_be_submitted_again(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    engine.submit([ask(kind, 1)])
    with pytest.raises(ValueError, match="in flight"):
        engine.submit([ask(kind, 2), ask(kind, 1)])
    with pytest.raises(ValueError, match="in flight"):
        engine.submit([ask(kind, 3), ask(kind, 3)])
    assert engine.pending == 1  # a refused call takes nothing in
    assert set(finish(engine)) == {1}
    engine.submit([ask(kind, 1)])
    assert set(finish(engine)) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_over_the_context_fails_alone_and_names_both_numbers(
    make_engine: MakeEngine, kind: Kind
) -> None:
    engine = make_engine(kind)
    engine.submit([ask(kind, "good"), ask(kind, "long", length=20_004)])
    results = finish(engine)
    failure = results["long"]
    assert isinstance(failure, Failure)
    assert failure.reason is FailureReason.TOO_LONG
    assert failure.message == (
        "This model's maximum context length is 64 tokens, but the input has 20004 tokens."
    )
    assert not isinstance(results["good"], Failure)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [(), (10**6,), (-1,)])
def test_an_empty_text_or_an_unknown_token_is_invalid(
    make_engine: MakeEngine, kind: Kind, tokens: tuple[int, ...]
) -> None:
    engine = make_engine(kind)
    sampling = Sampling(max_tokens=1)
    engine.submit(
        [EncodeRequest(1, tokens) if kind is Kind.EMBED else GenerateRequest(1, tokens, sampling)]
    )
    [result] = engine.step()
    assert isinstance(result, Failure)
    assert result.reason is FailureReason.INVALID


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_a_request_of_the_other_kind_is_invalid(
    make_engine: MakeEngine, kind: Kind, other: Kind
) -> None:
    engine = make_engine(kind)
    engine.submit([ask(other, "odd"), ask(kind, "even")])
    results = finish(engine)
    assert isinstance(results["odd"], Failure)
    assert results["odd"].reason is FailureReason.INVALID
    assert not isinstance(results["even"], Failure)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_gets_no_result_and_its_id_is_free(
    make_engine: MakeEngine, kind: Kind
) -> None:
    engine = make_engine(kind, max_rows=4)
    engine.submit(ask(kind, n, max_tokens=20) for n in range(12))
    early = {result.id for result in engine.step()}
    engine.abort([2, 3, 11, "unknown"])
    engine.submit([ask(kind, 3)])
    results = finish(engine)
    assert early | set(results) == set(range(12)) - ({2, 11} - early)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_failure_is_not_reported(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    engine.submit([ask(kind, 1, length=1000)])
    engine.abort([1])
    assert engine.pending == 0
    assert engine.step() == []


@pytest.mark.parametrize("kind", KINDS)
def test_counters_add_up(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    results = dict(engine.run([*(ask(kind, n, length=n + 1) for n in range(9)), ask(kind, 9, 99)]))
    counters = engine.counters
    assert (counters.requests, counters.failures) == (10, 1)
    assert counters.input_tokens == sum(range(1, 10))
    made = [result.output_tokens for result in results.values() if isinstance(result, Generation)]
    assert counters.output_tokens == sum(made)
    assert counters.padded_tokens >= counters.input_tokens
    assert counters.steps > 0


def test_vectors_are_of_the_stated_length_and_normalised(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.EMBED)
    for _, result in engine.run(ask(Kind.EMBED, n, length=n + 1) for n in range(5)):
        assert isinstance(result, Embedding)
        assert result.vector.shape == (engine.dimensions,)
        assert result.vector.dtype == np.float32
        assert np.linalg.norm(result.vector) == pytest.approx(1, abs=1e-5)
    assert make_engine(Kind.GENERATE).dimensions is None


def test_equal_texts_have_equal_vectors_whatever_runs_beside(make_engine: MakeEngine) -> None:
    alone = dict(make_engine(Kind.EMBED).run([ask(Kind.EMBED, 0, length=12)]))[0]
    among = dict(make_engine(Kind.EMBED).run(ask(Kind.EMBED, n, length=n) for n in range(1, 30)))[
        11
    ]
    assert isinstance(alone, Embedding)
    assert isinstance(among, Embedding)
    np.testing.assert_allclose(alone.vector, among.vector, atol=1e-6)


def test_an_answer_ends_at_max_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.GENERATE)
    results = dict(engine.run(ask(Kind.GENERATE, n, max_tokens=n) for n in range(1, 9)))
    for index, result in results.items():
        assert isinstance(result, Generation)
        assert result.output_tokens == len(result.token_ids) <= index + 1
        if result.finish_reason is FinishReason.LENGTH:
            assert result.output_tokens == index + 1
    assert any(r.finish_reason is FinishReason.LENGTH for r in results.values())  # type: ignore[union-attr]  # all are Generations


def test_prompt_and_max_tokens_together_must_fit(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.GENERATE)
    engine.submit([ask(Kind.GENERATE, "fits", length=50, max_tokens=14)])
    engine.submit([ask(Kind.GENERATE, "over", length=50, max_tokens=15)])
    results = finish(engine)
    assert isinstance(results["fits"], Generation)
    failure = results["over"]
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.param) == (FailureReason.TOO_LONG, "max_tokens")
    assert "64" in failure.message
    assert "65" in failure.message


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ("a", "")}, "stop"),
    ],
)
def test_a_sampling_setting_out_of_range_is_named(
    make_engine: MakeEngine, sampling: dict[str, Any], param: str
) -> None:
    engine = make_engine(Kind.GENERATE)
    engine.submit([ask(Kind.GENERATE, 1, **sampling)])
    [failure] = engine.step()
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.param) == (FailureReason.INVALID, param)


def test_an_answer_is_cut_before_its_stop_string(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.GENERATE)
    request = ask(Kind.GENERATE, 0, length=30, max_tokens=30)
    whole = dict(engine.run([request]))[0]
    assert isinstance(whole, Generation)
    place = next(
        place
        for place in range(3, len(whole.text) - 2)
        if "\ufffd" not in whole.text[place : place + 2]
    )
    stop = whole.text[place : place + 2]
    cut = dict(
        engine.run([ask(Kind.GENERATE, 0, length=30, max_tokens=30, stop=("absent", stop))])
    )[0]
    assert isinstance(cut, Generation)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.output_tokens < whole.output_tokens


def test_samples_depend_on_seed_and_choice_alone(make_engine: MakeEngine) -> None:
    prompt = tuple(range(40, 60))

    def request(key: Any, seed: int, choice: int = 0) -> GenerateRequest:
        return GenerateRequest(key, prompt, Sampling(max_tokens=12, seed=seed), choice)

    alone = dict(make_engine(Kind.GENERATE).run([request(0, seed=5)]))[0]
    crowd = [request(n, seed=n) for n in range(8)] + [request("c", seed=5, choice=1)]
    among = dict(make_engine(Kind.GENERATE).run(crowd))
    assert isinstance(alone, Generation)
    texts = [result.token_ids for _, result in sorted(among.items())]  # type: ignore[union-attr]  # all are Generations
    assert texts[5] == alone.token_ids
    if len(set(texts)) > 1:  # the stub draws nothing
        assert len(set(texts)) == len(crowd)


@pytest.mark.parametrize("kind", [Kind.CLASSIFY, Kind.SCORE])
def test_a_kind_that_is_not_served_is_refused_at_once(make_engine: MakeEngine, kind: Kind) -> None:
    with pytest.raises(ModelLoadError, match=kind.value):
        make_engine(kind)
