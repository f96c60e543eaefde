"""Does the decode loop write what transformers writes, and does it survive a shortage of memory?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate.padded import GenerateLoop
from engine.model.load import Decoder, load_decoder
from engine.request import (
    Failure,
    FailureReason,
    GenerateRequest,
    Generation,
    Result,
    Sampling,
)
from engine.tokenizer import Tokenizer

MakeDecoder = Callable[[str], Path]
NAMES = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gpt2", "gpt-neox", "opt"]
LENGTHS = [1, 2, 5, 9, 14, 16, 17, 23, 30, 31, 40]
NEW = 12


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(3, 259, (length,), generator=generator).tolist()) for length in LENGTHS
    ]


def greedy(max_tokens: int = NEW) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)


def reference(folder: Path, asked: list[tuple[int, ...]], new: int) -> list[tuple[int, ...]]:
    """The slow, obvious way: transformers' own generate, one prompt at a time, no padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
        )
        answers.append(tuple(output[0, len(prompt) :].tolist()))
    return answers


def answers_of(results: dict[int, Result]) -> list[tuple[int, ...]]:
    answers = []
    for _, result in sorted(results.items()):
        assert isinstance(result, Generation)
        answers.append(result.token_ids)
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(make_decoder: MakeDecoder, name: str) -> None:
    folder = make_decoder(name)
    expected = reference(folder, prompts(), NEW)
    assert len(set(expected)) > len(expected) // 2  # a model that says one thing proves nothing
    for prefill_tokens in (1024, 16):  # whole prompts, and prompts in pieces
        config = EngineConfig(model=folder, kind=Kind.GENERATE, prefill_tokens=prefill_tokens)
        requests = [GenerateRequest(n, p, greedy()) for n, p in enumerate(prompts())]
        assert answers_of(dict(Engine(config).run(requests))) == expected


def test_real_answers_equal_those_of_transformers(smollm: Path) -> None:
    engine = Engine(EngineConfig(model=smollm, kind=Kind.GENERATE))
    tokenizer = Tokenizer.from_dir(smollm)
    questions = [
        "What is the capital of France?",
        "Name three colours.",
        "Write one sentence about the sea, the moon, and the tide that binds the two together.",
        "Is water wet?",
    ]
    asked = [
        tuple(tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": text}])))
        for text in questions
    ]
    requests = [GenerateRequest(n, prompt, greedy(16)) for n, prompt in enumerate(asked)]
    results = dict(engine.run(requests))
    assert answers_of(results) == reference(smollm, asked, 16)
    first = results[0]
    assert isinstance(first, Generation)
    assert first.text == "The capital of France is Paris."
    assert first.token_ids[-1] == tokenizer.eos_id  # counted, but not part of the text


@pytest.mark.parametrize("place", [0, 4, NEW - 1])
def test_a_closing_token_ends_the_answer_and_is_counted(
    make_decoder: MakeDecoder, place: int
) -> None:
    folder = make_decoder("llama")
    prompt = prompts()[7]
    [whole] = reference(folder, [prompt], NEW)
    end = whole[place]
    decoder = dataclasses.replace(load(folder), eos_ids=frozenset({end}))
    [result] = drain(GenerateLoop(decoder, config_of(folder)), [prompt]).values()
    assert isinstance(result, Generation)
    assert result.token_ids == whole[: whole.index(end) + 1]
    assert result.text == decoder.tokenizer.decode(result.token_ids[:-1])
    assert result.finish_reason == "stop"


def test_rows_that_are_aborted_do_not_disturb_the_others(make_decoder: MakeDecoder) -> None:
    folder = make_decoder("mistral-window")
    expected = reference(folder, prompts(), NEW)
    for steps_before in range(6):
        config = EngineConfig(model=folder, kind=Kind.GENERATE, prefill_tokens=32)
        engine = Engine(config)
        engine.submit(GenerateRequest(n, p, greedy()) for n, p in enumerate(prompts()))
        results = {result.id: result for _ in range(steps_before) for result in engine.step()}
        aborted = set(range(0, len(LENGTHS), 2)) - set(results)
        assert aborted
        engine.abort(aborted)
        while engine.pending:
            results.update({result.id: result for result in engine.step()})
        left = sorted(set(range(len(LENGTHS))) - aborted)
        assert sorted(results) == left  # type: ignore[type-var]  # ids are integers here
        assert answers_of(results) == [expected[n] for n in left]  # type: ignore[arg-type]  # as above


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=folder, kind=Kind.GENERATE)


def load(folder: Path) -> Decoder:
    return load_decoder(config_of(folder))


class Moody:
    """A model whose forward raises when `fails` says so, given ids and mask."""

    def __init__(self, model: Any, fails: Callable[..., bool]) -> None:
        self._model = model
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        if self._fails(inputs["input_ids"], inputs["attention_mask"]):
            msg = "injected"
            raise torch.OutOfMemoryError(msg)
        return self._model(**inputs)


def drain(loop: GenerateLoop, asked: list[tuple[int, ...]]) -> dict[int, Result]:
    loop.add(GenerateRequest(n, prompt, greedy()) for n, prompt in enumerate(asked))
    results: dict[int, Result] = {}
    with torch.inference_mode():
        for _ in range(2000):
            for result in loop.step().results:
                assert result.id not in results
                results[result.id] = result  # type: ignore[index]  # ids are integers here
            if len(results) == len(asked):
                return results
    pytest.fail("the loop did not finish")


@pytest.mark.parametrize("while_decoding", [False, True])
def test_a_batch_that_is_too_large_for_memory_is_cut_and_its_answers_stay_the_same(
    make_decoder: MakeDecoder, while_decoding: bool
) -> None:
    folder = make_decoder("llama")
    asked = [prompt for prompt in prompts() for _ in range(3)]
    shortages = 0

    def fails(ids: Any, mask: Any) -> bool:
        nonlocal shortages
        short = ids.shape[0] > 2 and (ids.shape[1] == 1 or not while_decoding)
        shortages += short
        return short

    decoder = load(folder)
    decoder = dataclasses.replace(decoder, model=Moody(decoder.model, fails))
    results = drain(GenerateLoop(decoder, config_of(folder)), asked)
    assert shortages > 0
    assert answers_of(results) == reference(folder, asked, NEW)


def test_a_request_too_large_for_memory_even_alone_fails_alone(make_decoder: MakeDecoder) -> None:
    folder = make_decoder("llama")
    calls = 0

    def fails(ids: Any, mask: Any) -> bool:
        nonlocal calls
        calls += 1
        return bool(mask.shape[1] >= 40)

    decoder = load(folder)
    decoder = dataclasses.replace(decoder, model=Moody(decoder.model, fails))
    config = dataclasses.replace(config_of(folder), prefill_tokens=10_000)
    results = drain(GenerateLoop(decoder, config), prompts())
    failed = {n for n, result in results.items() if isinstance(result, Failure)}
    assert failed == {n for n, length in enumerate(LENGTHS) if length + NEW - 1 >= 40}
    for n in failed:
        result = results[n]
        assert isinstance(result, Failure)
        assert result.reason is FailureReason.OUT_OF_MEMORY
    assert calls < 500


def test_another_error_of_the_model_is_not_taken_for_a_shortage(make_decoder: MakeDecoder) -> None:
    decoder = load(make_decoder("llama"))

    def fails(ids: Any, mask: Any) -> bool:
        msg = "a bug"
        raise RuntimeError(msg)

    decoder = dataclasses.replace(decoder, model=Moody(decoder.model, fails))
    with pytest.raises(RuntimeError, match="a bug"):
        drain(GenerateLoop(decoder, config_of(make_decoder("llama"))), prompts())


def test_a_row_without_finite_scores_fails_alone(make_decoder: MakeDecoder) -> None:
    folder = make_decoder("llama")
    decoder = load(folder)
    asked = prompts()
    poison = asked[3][-1]

    class Sick(Moody):
        def __call__(self, **inputs: Any) -> Any:
            output = self._model(**inputs)
            output.logits[inputs["input_ids"][:, -1] == poison] = float("nan")
            return output

    others = [p for p in range(len(asked)) if poison not in reference(folder, [asked[p]], NEW)[0]]
    others.remove(3)
    assert others
    decoder = dataclasses.replace(decoder, model=Sick(decoder.model, lambda *_: False))
    results = drain(GenerateLoop(decoder, config_of(folder)), asked)
    failure = results[3]
    assert isinstance(failure, Failure)
    assert failure.reason is FailureReason.NON_FINITE
    assert all(isinstance(results[n], Generation) for n in others if asked[n][-1] != poison)
