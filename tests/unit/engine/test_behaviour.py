"""Does every engine keep the promises of the surface? The real one and the stub alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import Kind
from engine.request import (
    Classification,
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
    TokenClassification,
)
from engine.surface import EngineLike

MakeEngine = Callable[..., EngineLike]
KINDS = list(Kind)
ENCODING = [kind for kind in Kind if kind is not Kind.GENERATE]
RESULTS: dict[Kind, type[Result]] = {
    Kind.GENERATE: Generation,
    Kind.EMBED: Embedding,
    Kind.CLASSIFY: Classification,
    Kind.SCORE: Classification,
    Kind.TOKEN_CLASSIFY: TokenClassification,
}


def ask(kind: Kind, key: Any, length: int = 10, **sampling: Any) -> Request:
    tokens = tuple(40 + (7 * place + length) % 80 for place in range(length))
    if kind is not Kind.GENERATE:
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
    assert all(isinstance(result, RESULTS[kind]) for result in results.values())
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
        [EncodeRequest(1, tokens) if kind in ENCODING else GenerateRequest(1, tokens, sampling)]
    )
    [result] = engine.step()
    assert isinstance(result, Failure)
    assert result.reason is FailureReason.INVALID


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_the_other_kind_is_invalid(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    other = Kind.EMBED if kind is Kind.GENERATE else Kind.GENERATE
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


def values(result: Result) -> np.ndarray:
    """What a model says of a text, as numbers."""
    match result:
        case Embedding():
            return result.vector
        case Classification():
            return result.logits
        case TokenClassification():
            return result.scores
    pytest.fail(f"no encoded text: {result}")


@pytest.mark.parametrize("kind", ENCODING)
def test_equal_texts_have_equal_results_whatever_runs_beside(
    make_engine: MakeEngine, kind: Kind
) -> None:
    alone = dict(make_engine(kind).run([ask(kind, 0, length=12)]))[0]
    among = dict(make_engine(kind).run(ask(kind, n, length=n) for n in range(1, 30)))
    np.testing.assert_allclose(values(alone), values(among[11]), atol=1e-6)
    assert len({values(result).tobytes() for result in among.values()}) > 20  # no constant


FACTS = {
    Kind.GENERATE: (False, 0),
    Kind.EMBED: (True, 0),
    Kind.CLASSIFY: (False, 3),
    Kind.SCORE: (False, 1),
    Kind.TOKEN_CLASSIFY: (False, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_says_what_it_makes(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    vectors, labels = FACTS[kind]
    assert (engine.dimensions is not None) == vectors
    assert engine.smaller_dimensions == ()
    assert len(set(engine.labels)) == len(engine.labels) == labels
    assert engine.context_length == 64
    assert engine.status.token_budget > 0


@pytest.mark.parametrize("kind", [Kind.CLASSIFY, Kind.SCORE])
def test_a_text_scores_on_every_label(make_engine: MakeEngine, kind: Kind) -> None:
    engine = make_engine(kind)
    for _, result in engine.run(ask(kind, n, length=n + 1) for n in range(9)):
        assert isinstance(result, Classification)
        assert result.logits.shape == result.scores.shape == (len(engine.labels),)
        assert result.logits.dtype == result.scores.dtype == np.float32
        if kind is Kind.CLASSIFY:
            expected = np.exp(result.logits) / np.exp(result.logits).sum()
        else:
            expected = 1 / (1 + np.exp(-result.logits))
        np.testing.assert_allclose(result.scores, expected, rtol=1e-5)


def test_every_token_scores_on_every_label(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.TOKEN_CLASSIFY)
    for n, result in engine.run(ask(Kind.TOKEN_CLASSIFY, n, length=n + 1) for n in range(9)):
        assert isinstance(result, TokenClassification)
        assert result.scores.shape == (n + 1, len(engine.labels))
        assert result.scores.dtype == np.float32
        np.testing.assert_allclose(result.scores.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", [Kind.CLASSIFY, Kind.SCORE])
def test_where_the_first_text_of_a_pair_ends_makes_a_difference(
    make_engine: MakeEngine, kind: Kind
) -> None:
    engine = make_engine(kind)
    tokens = tuple(range(40, 52))
    requests = [EncodeRequest(first, tokens, first=first) for first in (4, 7, 12)]
    results = dict(engine.run([*requests, EncodeRequest("none", tokens)]))
    found = [values(results[n]) for n in range(4)]
    assert not np.allclose(found[0], found[1])
    assert not np.allclose(found[1], found[2])


@pytest.mark.parametrize("kind", ENCODING)
@pytest.mark.parametrize("first", [-1, 13, 4])
def test_a_first_text_that_cannot_be_is_invalid(
    make_engine: MakeEngine, kind: Kind, first: int
) -> None:
    engine = make_engine(kind)
    engine.submit([EncodeRequest(1, tuple(range(40, 52)), first=first)])
    result = finish(engine)[1]
    if first == 4 and kind in (Kind.CLASSIFY, Kind.SCORE):
        assert isinstance(result, Classification)
    else:
        assert isinstance(result, Failure)
        assert result.reason is FailureReason.INVALID


def test_a_vector_is_cut_to_a_listed_length_and_normalised(make_engine: MakeEngine) -> None:
    engine = make_engine(Kind.EMBED, dimensions=(16, 8))
    assert engine.smaller_dimensions == (8, 16)
    tokens = tuple(range(40, 52))
    asked = [None, 8, 16, engine.dimensions]
    results = dict(engine.run(EncodeRequest(n, tokens, dimensions=n) for n in asked))
    whole, *others = [values(results[n]) for n in range(4)]
    for size, short in zip(asked[1:], others, strict=True):
        assert short.shape == (size,)
        np.testing.assert_allclose(
            short, whole[:size] / np.linalg.norm(whole[:size]), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("kind", ENCODING)
def test_a_length_that_is_not_listed_is_invalid_and_names_those_that_are(
    make_engine: MakeEngine, kind: Kind
) -> None:
    engine = make_engine(kind, **({"dimensions": (8, 16)} if kind is Kind.EMBED else {}))
    engine.submit([EncodeRequest(1, (40, 41), dimensions=12)])
    [failure] = engine.step()
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.param) == (FailureReason.INVALID, "dimensions")
    if kind is Kind.EMBED:
        assert f"8, 16 or {engine.dimensions} dimensions, not of 12" in failure.message
    else:
        assert failure.message == "This model makes no vectors."


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
