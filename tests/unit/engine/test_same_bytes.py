"""With `deterministic`, is an answer the same to the bit in any company, cut, resumed or alone?"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.generate import attention, row_bytes
from engine.generate.guesses import Guesses
from engine.model.int8 import has_fast_int8
from engine.request import GenerateRequest, Generation, Result, Sampling
from engine.tokenizer import Tokenizer
from tests.unit.engine.test_continuous import (
    COUNTRIES,
    NAMES,
    QUESTIONS,
    MakeDecoder,
    any_decoder,
    crowd,
    greedy,
    prompts,
    reference,
    tokens_of,
)

__all__ = ["any_decoder"]  # a fixture

# Each expert's rows are a product of their own, of as many rows as neighbours bring to it.
EXPERTS = ["mixtral", "qwen3-moe", "gpt-oss"]
LONG = 100  # tokens


def engine_of(folder: Path, **changes: Any) -> Engine:
    context = {"context_length": 128} if "context_length" not in changes else {}
    return Engine(
        EngineConfig(model=folder, kind=Kind.GENERATE, deterministic=True, **context, **changes)
    )


def asked(new: int = 10) -> list[GenerateRequest]:
    """Greedy and drawn, with the log probabilities of what was likely."""
    generator = torch.Generator().manual_seed(8)
    long = tuple(torch.randint(3, 259, (LONG,), generator=generator).tolist())
    texts = [*prompts(), long, (*long[:70], 5, 6, 7), *crowd()]
    return [
        GenerateRequest(
            number,
            text,
            Sampling(max_tokens=new, temperature=number % 2, seed=number, logprobs=5),
        )
        for number, text in enumerate(texts)
    ]


def told(results: dict[Any, Result]) -> dict[Any, Any]:
    """All that an answer says of its tokens and of the scores they came from."""
    found = {}
    for number, result in results.items():
        assert isinstance(result, Generation)
        found[number] = (result.token_ids, result.logprobs, result.candidates)
    return found


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[Any, Any]:
    return told({result.id: result for _, result in engine.run(requests)})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXPERTS])
def test_answers_are_the_same_to_the_bit(any_decoder: MakeDecoder, name: str) -> None:
    folder = any_decoder(name)
    engine = engine_of(folder)
    assert engine.status.same_bytes
    together = run(engine, asked())
    assert engine.counters.cached_tokens > 0  # beginnings were shared
    for request in asked()[::3]:
        assert run(engine, [request]) == {request.id: together[request.id]}
    cut = engine_of(folder, prefill_tokens=11, max_sequences=5)
    assert run(cut, asked()) == together
    assert cut.counters.guessed_tokens > 0
    assert resumed(engine_of(folder, prefill_tokens=40)) == together


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXPERTS])
def test_answers_are_the_same_to_the_bit_after_preemption(
    any_decoder: MakeDecoder, name: str
) -> None:
    folder = any_decoder(name)
    requests = [
        GenerateRequest(n, prompt, Sampling(max_tokens=30, temperature=n % 2, logprobs=5, seed=n))
        for n, prompt in enumerate(crowd())
    ]
    roomy, tight = engine_of(folder), engine_of(folder, cache_tokens=96)
    list(tight.run([GenerateRequest("short", (5,), greedy(1))]))  # answers are thought short
    assert run(tight, requests) == run(roomy, requests)
    assert tight.counters.preempted > roomy.counters.preempted == 0


def resumed(engine: Engine) -> dict[Any, Any]:
    """Every other request is dropped after a few steps, and asked again two steps later."""
    engine.submit(asked())
    results = {result.id: result for _ in range(4) for result in engine.step()}
    dropped = [request for request in asked()[::2] if request.id not in results]
    assert dropped
    engine.abort([request.id for request in dropped])
    results |= {result.id: result for _ in range(2) for result in engine.step()}
    engine.submit(dropped)
    while engine.pending:
        results |= {result.id: result for result in engine.step()}
    return told(results)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "gpt2"])
def test_answers_are_the_same_to_the_bit_where_guesses_come_true(
    any_decoder: MakeDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = any_decoder(name)
    requests = asked(30)[::4]
    plain = run(engine_of(folder, guess_rows=0), requests)
    by_prompt = {request.prompt: plain[request.id][0] for request in requests}

    def mostly_right(self: Any, made: Sequence[int], most: int) -> tuple[int, ...]:
        answer = by_prompt[tuple(self._text[: self._prompt])]
        wrong = answer[len(made) + 2 : len(made) + 3] and (answer[len(made) + 2] + 1,)
        return (*answer[len(made) : len(made) + 2], *wrong)[:most]

    monkeypatch.setattr(Guesses, "next", mostly_right)
    engine = engine_of(folder)
    assert run(engine, requests) == plain
    assert engine.counters.guessed_tokens > engine.counters.guessed_right > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "gpt2"])
def test_greedy_tokens_equal_those_of_transformers(any_decoder: MakeDecoder, name: str) -> None:
    folder = any_decoder(name)
    requests = [GenerateRequest(n, prompt, greedy()) for n, prompt in enumerate(prompts())]
    assert tokens_of(dict(engine_of(folder).run(requests))) == reference(folder)


@pytest.mark.parametrize("quantize", [None, Quantize.INT8])
def test_real_answers_are_the_same_to_the_bit(smollm: Path, quantize: Quantize | None) -> None:
    if quantize is not None and not has_fast_int8():
        pytest.skip("no fast int8 on this chip")
    tokenizer = Tokenizer.from_dir(smollm)
    system = "You are a patient teacher of geography. Answer in one short sentence. " * 4
    requests = [
        GenerateRequest(
            (question, country),
            tuple(
                tokenizer.encode_rendered(
                    tokenizer.render_chat(
                        [
                            {"role": "system", "content": system},
                            {"role": "user", "content": question.format(country)},
                        ]
                    )
                )
            ),
            Sampling(max_tokens=12, temperature=number % 2, seed=3, logprobs=5, candidates=(5, 9)),
        )
        for number, question in enumerate(QUESTIONS)
        for country in COUNTRIES[:10]
    ]
    options = {"context_length": 512, "quantize": quantize}
    engine = engine_of(smollm, **options)
    together = run(engine, requests)
    for request in requests[::7]:
        assert run(engine, [request]) == {request.id: together[request.id]}
    cut = engine_of(smollm, **options, prefill_tokens=53, max_sequences=7, cache_tokens=1024)
    assert run(cut, requests) == together


@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_of_experts_is_refused(any_decoder: MakeDecoder, name: str) -> None:
    with pytest.raises(ModelLoadError, match="deterministic"):
        engine_of(any_decoder(name))


def test_attention_that_depends_on_neighbours_is_found_out(
    any_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_rows = attention.read_rows

    def disturbed(queries: torch.Tensor, *others: Any) -> None:
        read_rows(queries * (1 + len(queries) * 1e-6), *others)

    engine_of(any_decoder("llama"))
    monkeypatch.setattr(attention, "read_rows", disturbed)
    with pytest.raises(ModelLoadError, match="deterministic"):
        engine_of(any_decoder("llama"))


def test_products_that_depend_on_the_number_of_rows_are_found_out(
    any_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., torch.Tensor] = row_bytes.PrepackedLinear.forward

    def disturbed(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return forward(self, rows) * (1 + 1e-6 * (rows.shape[-2] == 13 * row_bytes.FULL))

    monkeypatch.setattr(row_bytes.PrepackedLinear, "forward", disturbed)
    with pytest.raises(ModelLoadError, match="deterministic"):
        engine_of(any_decoder("llama"))
