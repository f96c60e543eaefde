"""Does continuous batching write what transformers writes, however sequences meet?"""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.generate import continuous
from engine.generate.continuous import ContinuousLoop
from engine.generate.forward import PackedForward
from engine.generate.padded import GenerateLoop
from engine.generate.probe import continuous_forward
from engine.model.load import load_decoder
from engine.request import (
    Failure,
    FailureReason,
    GenerateRequest,
    Generation,
    Grammar,
    GrammarKind,
    Result,
    Sampling,
)
from engine.tokenizer import Tokenizer
from tests.unit.engine.conftest import LLAMA_LIKE, SMALL, write_tokenizer

NEW = 10
SHARED = 24

GPT_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE: dict[str, Callable[[], Any]] = {
    "gemma": lambda: transformers.GemmaConfig(**LLAMA_LIKE, head_dim=8),
    "glm": lambda: transformers.GlmConfig(**LLAMA_LIKE, head_dim=8),
    "exaone4": lambda: transformers.Exaone4Config(**LLAMA_LIKE, sliding_window=9),
    "helium": lambda: transformers.HeliumConfig(**LLAMA_LIKE, head_dim=8),
    "mixtral": lambda: transformers.MixtralConfig(
        **LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi": lambda: transformers.PhiConfig(**GPT_LIKE),
    "phi3": lambda: transformers.Phi3Config(**LLAMA_LIKE),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**LLAMA_LIKE, "num_hidden_layers": 3}, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA_LIKE),
    "smollm3": lambda: transformers.SmolLM3Config(**LLAMA_LIKE),
    "starcoder2-window": lambda: transformers.Starcoder2Config(**LLAMA_LIKE, sliding_window=9),
    "granite": lambda: transformers.GraniteConfig(**LLAMA_LIKE),
    "stablelm": lambda: transformers.StableLmConfig(**LLAMA_LIKE),
    "cohere": lambda: transformers.CohereConfig(**LLAMA_LIKE),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA_LIKE, **MOE, head_dim=8, num_experts=4
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **LLAMA_LIKE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=128
    ),
}  # fmt: skip
NAMES = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gpt2", "gpt-neox", "opt", *MORE]

MakeDecoder = Callable[[str], Path]
Prompts = Callable[[], list[tuple[int, ...]]]


@pytest.fixture(scope="session")
def any_decoder(make_decoder: MakeDecoder, tmp_path_factory: pytest.TempPathFactory) -> MakeDecoder:
    """The folder of a tiny random decoder, of the architectures above too."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in MORE:
            return make_decoder(name)
        if name not in made:
            made[name] = write_model(tmp_path_factory.mktemp(name), MORE[name]())
        return made[name]

    return make


def write_model(folder: Path, config: Any) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that the likeliest token is so by far
    model.save_pretrained(folder)
    write_tokenizer(folder, ends=False)
    return folder


def prompts() -> list[tuple[int, ...]]:
    """Some that begin alike, two that are equal, some that stand alone, of many lengths."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 259, (length,), generator=generator).tolist())

    head, branch = draw(SHARED), draw(17)
    alike = [head + draw(length) for length in (1, 2, 9, 14)]
    alike += [head + branch + draw(length) for length in (3, 6, 12)]
    return [*alike, alike[2], *(draw(length) for length in (1, 2, 5, 16, 33, 50))]


def greedy(max_tokens: int = NEW) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)


def crowd() -> list[tuple[int, ...]]:
    """Prompts whose answers outgrow the slots that they begin in."""
    generator = torch.Generator().manual_seed(4)
    draws = (torch.randint(3, 259, (length,), generator=generator) for length in range(10, 16))
    return [tuple(draw.tolist()) for draw in draws]


_KNOWN: dict[tuple[Path, int, Prompts], list[tuple[int, ...]]] = {}


def reference(folder: Path, new: int = NEW, prompts: Prompts = prompts) -> list[tuple[int, ...]]:
    """The slow, obvious way: transformers' own generate, one prompt at a time, no padding."""
    if (folder, new, prompts) not in _KNOWN:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        answers = []
        for prompt in prompts():
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
            )
            answers.append(tuple(output[0, len(prompt) :].tolist()))
        _KNOWN[folder, new, prompts] = answers
    return _KNOWN[folder, new, prompts]


def loop_of(folder: Path, wrap: Callable[[Any], Any] = lambda m: m, **changes: Any) -> Any:
    """A loop on the packed path, its model wrapped after the probe."""
    config = EngineConfig(model=folder, kind=Kind.GENERATE, **changes)
    decoder = load_decoder(config)
    with torch.inference_mode():
        found = continuous_forward(decoder, config.cache_tokens)
    assert found is not None
    forward, tokens = found
    model = wrap(forward._decoder.model)
    forward._decoder = dataclasses.replace(forward._decoder, model=model)
    return ContinuousLoop(decoder, forward, tokens, config)


def asked(new: int = NEW, prompts: Prompts = prompts) -> list[GenerateRequest]:
    return [GenerateRequest(n, prompt, greedy(new)) for n, prompt in enumerate(prompts())]


def drain(loop: ContinuousLoop, requests: list[GenerateRequest]) -> dict[int, Result]:
    loop.add(requests)
    results: dict[int, Result] = {}
    with torch.inference_mode():
        for _ in range(3000):
            if len(results) == len(requests):
                return results
            for result in loop.step().results:
                assert result.id not in results
                results[result.id] = result  # type: ignore[index]  # ids are integers here
    pytest.fail("the loop did not finish")


def tokens_of(results: dict[int, Result]) -> list[tuple[int, ...]]:
    answers = []
    for _, result in sorted(results.items()):
        assert isinstance(result, Generation)
        answers.append(result.token_ids)
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(any_decoder: MakeDecoder, name: str) -> None:
    folder = any_decoder(name)
    expected = reference(folder)
    assert len(set(expected)) > len(expected) // 2  # a model that says one thing proves nothing
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128))
    assert engine.status.path == "packed"
    assert tokens_of(dict(engine.run(asked()))) == expected  # together, beginnings shared
    assert engine.counters.cached_tokens > 5 * SHARED
    alone = [dict(engine.run([request]))[0] for request in asked()[:4]]
    assert tokens_of(dict(enumerate(alone))) == expected[:4]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_when_prompts_come_in_pieces(
    any_decoder: MakeDecoder, name: str
) -> None:
    folder = any_decoder(name)
    config = EngineConfig(
        model=folder, kind=Kind.GENERATE, context_length=128, prefill_tokens=11, cache_tokens=96
    )
    engine = Engine(config)
    assert engine.status.path == "packed"
    assert tokens_of(dict(engine.run(asked()))) == reference(folder)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_after_preemption(any_decoder: MakeDecoder, name: str) -> None:
    folder = any_decoder(name)
    config = EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, cache_tokens=96)
    engine = Engine(config)
    assert engine.status.path == "packed"
    short = GenerateRequest("short", (5,), greedy(1))
    list(engine.run([short]))  # so that answers are thought short, and memory runs out
    assert tokens_of(dict(engine.run(asked(30, crowd)))) == reference(folder, 30, crowd)
    assert engine.counters.preempted > 0


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_when_prompts_fork_what_is_computed(
    any_decoder: MakeDecoder, name: str
) -> None:
    """Prompts that come later part inside a stretch that earlier ones share and still read."""
    folder = any_decoder(name)
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128))
    requests = asked()
    first, later = requests[4:7], requests[:4]  # these part where the others have a branch to go
    engine.submit(first)
    results = {result.id: result for _ in range(3) for result in engine.step()}
    engine.submit(later)
    while engine.pending:
        results |= {result.id: result for result in engine.step()}
    assert tokens_of(results) == reference(folder)[:7]  # type: ignore[arg-type]  # ids are integers


@dataclasses.dataclass
class Oracle:
    """In the place of Guesses: knows the answers, and now and then says something else."""

    prompt: tuple[int, ...]
    answers: dict[tuple[int, ...], tuple[int, ...]]

    def next(self, made: list[int], most: int) -> tuple[int, ...]:
        rest = self.answers[self.prompt][len(made) :]
        size = min(most, len(made) % 4 + 1)
        wrong = (3 + (rest[0] + 1) % 200,) if len(made) % 3 == 0 else ()
        return (*rest[: len(made) % 5], *wrong, *rest)[:size]

    def learn(self, guessed: int, right: int, made: int) -> None:
        pass


def with_oracle(
    monkeypatch: pytest.MonkeyPatch, folder: Path, new: int = NEW, prompts: Prompts = prompts
) -> None:
    known = dict(zip(prompts(), reference(folder, new, prompts), strict=True))
    monkeypatch.setattr(continuous, "Guesses", lambda prompt: Oracle(prompt, known))


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_with_guesses(
    any_decoder: MakeDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones and wrong ones, beside prompts in pieces and over shared beginnings."""
    folder = any_decoder(name)
    with_oracle(monkeypatch, folder)
    config = EngineConfig(
        model=folder, kind=Kind.GENERATE, context_length=128, prefill_tokens=30, guess_rows=60
    )
    engine = Engine(config)
    assert engine.status.path == "packed"
    assert tokens_of(dict(engine.run(asked()))) == reference(folder)
    done = engine.counters
    assert 0 < done.guessed_right < done.guessed_tokens
    # Each answer's first token comes of its prompt, the others of next tokens and right guesses.
    wrong = done.guessed_tokens - done.guessed_right
    different = dict(zip(prompts(), reference(folder), strict=True)).values()
    assert done.decode_tokens - wrong == sum(len(answer) - 1 for answer in different)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_guesses_and_preemption_go_together(
    any_decoder: MakeDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = any_decoder(name)
    with_oracle(monkeypatch, folder, 30, crowd)
    config = EngineConfig(
        model=folder, kind=Kind.GENERATE, context_length=128, cache_tokens=96, guess_rows=30
    )
    engine = Engine(config)
    list(engine.run([GenerateRequest("short", (5,), greedy(1))]))
    assert tokens_of(dict(engine.run(asked(30, crowd)))) == reference(folder, 30, crowd)
    assert engine.counters.preempted > 0
    assert engine.counters.guessed_right > 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=24, temperature=0.9, seed=5, top_p=0.9),
        Sampling(max_tokens=24, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
        Sampling(max_tokens=24, temperature=0.0, logprobs=3, min_tokens=20),
        Sampling(
            max_tokens=24, temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "(abc){2,5}[xy]+")
        ),
    ],
    ids=["drawn", "penalties", "logprobs", "grammar"],
)
def test_every_parameter_is_honoured_with_guesses(
    any_decoder: MakeDecoder, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = any_decoder("llama")
    requests = [GenerateRequest(n, prompt, sampling) for n, prompt in enumerate(prompts()[3:])]
    config = EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, guess_rows=0)
    plain: Any = dict(Engine(config).run(requests))
    known = {request.prompt: plain[n].token_ids for n, request in enumerate(requests)}
    monkeypatch.setattr(continuous, "Guesses", lambda prompt: Oracle(prompt, known))
    engine = Engine(dataclasses.replace(config, guess_rows=60))
    found: Any = dict(engine.run(requests))
    assert engine.counters.guessed_right > 0
    for n in plain:
        assert found[n].token_ids == plain[n].token_ids
        assert (found[n].text, found[n].finish_reason) == (plain[n].text, plain[n].finish_reason)
        told = [each.logprob for each in found[n].logprobs or ()]
        assert told == pytest.approx([each.logprob for each in plain[n].logprobs or ()], abs=1e-4)


def test_an_answer_that_copies_its_prompt_takes_fewer_steps(smollm: Path) -> None:
    tokenizer = Tokenizer.from_dir(smollm)
    text = "Repeat after me: red, green, blue, white, black, red, green, blue, white, black, red,"
    prompt = tuple(tokenizer.encode_rendered(text))
    engine = Engine(EngineConfig(model=smollm, kind=Kind.GENERATE))
    assert engine.status.path == "packed"
    [(_, answer)] = engine.run([GenerateRequest("a", prompt, greedy(40))])
    assert isinstance(answer, Generation)
    guessed = engine.counters
    plain = Engine(EngineConfig(model=smollm, kind=Kind.GENERATE, guess_rows=0))
    [(_, expected)] = plain.run([GenerateRequest("a", prompt, greedy(40))])
    assert answer.token_ids == expected.token_ids  # type: ignore[union-attr]  # as above
    assert guessed.guessed_right > 20
    assert guessed.steps == plain.counters.steps - guessed.guessed_right


def test_the_fixed_text_of_a_form_is_guessed_and_no_answer_changes(smollm: Path) -> None:
    tokenizer = Tokenizer.from_dir(smollm)
    names = {name: {"type": "integer"} for name in ("number_of_lines", "number_of_words")}
    form = {"type": "object", "properties": names, "required": list(names)}
    asks = Sampling(
        max_tokens=60,
        temperature=0.0,
        grammar=Grammar(
            GrammarKind.JSON_SCHEMA, json.dumps(form | {"additionalProperties": False})
        ),
    )
    prompt = tuple(tokenizer.encode_rendered("A page with 40 lines and 300 words, as JSON: "))
    found = []
    for guess_rows in (0, 16):
        engine = Engine(EngineConfig(model=smollm, kind=Kind.GENERATE, guess_rows=guess_rows))
        [(_, answer)] = engine.run([GenerateRequest("a", prompt, asks)])
        assert isinstance(answer, Generation)
        found.append((answer.token_ids, answer.text, engine.counters.steps))
    assert found[0][:2] == found[1][:2]
    assert set(json.loads(found[1][1])) == set(names)
    assert found[1][2] <= found[0][2] - 6  # "number_of_lines" alone is six tokens


@pytest.mark.parametrize("steps_before", [0, 1, 3, 7])
def test_what_is_aborted_can_be_resumed_and_disturbs_nobody(
    any_decoder: MakeDecoder, steps_before: int
) -> None:
    abort_and_resume(any_decoder("mistral-window"), steps_before)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_when_they_are_resumed(any_decoder: MakeDecoder, name: str) -> None:
    abort_and_resume(any_decoder(name), 4)


def abort_and_resume(folder: Path, steps_before: int) -> None:
    """Every other request is dropped after so many steps, and asked again two steps later."""
    config = EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, prefill_tokens=40)
    engine = Engine(config)
    assert engine.status.path == "packed"
    engine.submit(asked())
    results = {result.id: result for _ in range(steps_before) for result in engine.step()}
    dropped = [request for request in asked()[::2] if request.id not in results]
    assert dropped
    engine.abort([request.id for request in dropped])
    results |= {result.id: result for _ in range(2) for result in engine.step()}
    engine.submit(dropped)
    while engine.pending:
        results |= {result.id: result for result in engine.step()}
    assert tokens_of(results) == reference(folder)  # type: ignore[arg-type]  # ids are integers


def test_equal_requests_are_computed_once_and_each_is_answered(any_decoder: MakeDecoder) -> None:
    loop = loop_of(any_decoder("llama"))
    [prompt] = prompts()[4:5]
    requests = [GenerateRequest(n, prompt, Sampling(max_tokens=8, seed=3)) for n in range(5)]
    requests.append(GenerateRequest(5, prompt, Sampling(max_tokens=8, seed=4)))
    results = drain(loop, requests)
    answers = [result for _, result in sorted(results.items()) if isinstance(result, Generation)]
    assert len({answer.token_ids for answer in answers[:5]}) == 1
    assert answers[5].token_ids != answers[0].token_ids
    assert sum(answer.input_tokens - answer.cached_tokens for answer in answers) == len(prompt) + 5


def test_the_first_of_twins_may_be_dropped(any_decoder: MakeDecoder) -> None:
    loop = loop_of(any_decoder("llama"))
    [prompt] = prompts()[4:5]
    loop.add([GenerateRequest(n, prompt, greedy()) for n in range(2)])
    loop.remove([0])
    with torch.inference_mode():
        found = [result for _ in range(NEW + 2) for result in loop.step().results]
    assert [result.id for result in found] == [1]


class Moody:
    """A model whose forward raises when `fails` says so, given ids and positions."""

    def __init__(self, model: Any, fails: Callable[..., bool]) -> None:
        self._model = model
        self._fails = fails

    def __call__(self, **inputs: Any) -> Any:
        if self._fails(inputs["input_ids"][0], inputs["position_ids"][0]):
            msg = "injected"
            raise torch.OutOfMemoryError(msg)
        return self._model(**inputs)


def test_steps_get_smaller_when_memory_runs_out_and_answers_stay(any_decoder: MakeDecoder) -> None:
    shortages = 0

    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        nonlocal shortages
        shortages += len(ids) > 5
        return len(ids) > 5

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails))
    assert tokens_of(drain(loop, asked())) == reference(any_decoder("llama"))
    assert 0 < shortages < 40


def test_what_is_too_large_for_memory_even_alone_fails_alone(any_decoder: MakeDecoder) -> None:
    calls = 0

    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        nonlocal calls
        calls += 1
        return bool(positions.max() >= 45)

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails))
    results = drain(loop, asked())
    failed = {n for n, result in results.items() if isinstance(result, Failure)}
    expected = reference(any_decoder("llama"))
    last = [len(p) + len(a) - 2 for p, a in zip(prompts(), expected, strict=True)]
    assert failed == {n for n, position in enumerate(last) if position >= 45}
    assert all(
        result.reason is FailureReason.OUT_OF_MEMORY
        for result in results.values()
        if isinstance(result, Failure)
    )
    for n, result in results.items():
        if isinstance(result, Generation):
            assert result.token_ids == expected[n]
    assert calls < 1500


def test_a_line_that_does_not_fit_leaves_the_steps_of_others_as_large_as_ever(
    any_decoder: MakeDecoder,
) -> None:
    sizes: list[int] = []

    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        sizes.append(len(ids))
        return bool(positions.max() >= 45)

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails), prefill_tokens=60)
    assert isinstance(drain(loop, [GenerateRequest(0, (5,) * 50, greedy())])[0], Failure)
    assert sizes[-2:] == [1, 1]
    small = [GenerateRequest(n, (5, n, *range(3, 13)), greedy(2)) for n in range(100, 180)]
    found = drain(loop, [dataclasses.replace(each, id=n) for n, each in enumerate(small)])
    assert all(isinstance(result, Generation) for result in found.values())
    assert max(sizes[2:]) == 60


def test_who_computes_the_token_that_does_not_fit_is_to_blame(any_decoder: MakeDecoder) -> None:
    """With a budget of one token the oldest may be in the middle of its prompt and wait."""
    prompt = prompts()[-2]

    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        return len(ids) > 1 or bool((ids == 7).any())

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails), prefill_tokens=4)
    sick = GenerateRequest(1, (5, 6, 7), greedy())
    results = drain(loop, [GenerateRequest(0, prompt, greedy()), sick])
    assert isinstance(results[1], Failure)
    assert results[1].message == (
        f"A request of {3 + NEW} tokens (max_tokens included) does not fit into memory."
    )
    assert tokens_of({0: results[0]}) == [reference(any_decoder("llama"))[-2]]


def test_steps_grow_again_after_a_shortage_that_has_passed(any_decoder: MakeDecoder) -> None:
    sizes: list[int] = []
    limit = 40

    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        sizes.append(len(ids))
        return len(sizes) < 7  # 40, 20, 10, 5, 2 and 1 token; the second try alone goes well

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails), prefill_tokens=limit)
    generator = torch.Generator().manual_seed(5)
    many = torch.randint(3, 259, (900, 30), generator=generator).tolist()
    requests = [GenerateRequest(n, tuple(prompt), greedy(1)) for n, prompt in enumerate(many)]
    assert all(isinstance(result, Generation) for result in drain(loop, requests).values())
    assert sizes[:8] == [40, 20, 10, 5, 2, 1, 1, 1]
    assert sizes[-2] == limit


def told_prompts(folder: Path, requests: list[GenerateRequest], **config: Any) -> list[Any]:
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, **config))
    assert engine.status.path == "packed"
    found = dict(engine.run(requests))
    assert engine.status.kv_held == 0
    return [found[n] for n in range(len(requests))]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt2", "gpt-oss"])
@pytest.mark.parametrize("config", [{}, {"prefill_tokens": 11, "cache_tokens": 96}])
def test_prompts_tell_how_likely_they_were(
    any_decoder: MakeDecoder, name: str, config: dict[str, int]
) -> None:
    """Beside others that share their beginnings, in pieces, with more tokens than a step tells."""
    folder = any_decoder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = dataclasses.replace(greedy(), prompt_logprobs=3)
    asked = [GenerateRequest(n, prompt, greedy()) for n, prompt in enumerate(prompts())]
    asked += [GenerateRequest(len(asked) + n, p, sampling) for n, p in enumerate(prompts())]
    results = told_prompts(folder, asked, **config)
    assert tokens_of(dict(enumerate(results))) == reference(folder) * 2
    for prompt, result in zip(prompts(), results[len(prompts()) :], strict=True):
        with torch.inference_mode():
            scores = model(torch.tensor([prompt])).logits[0].double()
        expected = torch.log_softmax(scores, dim=-1)
        assert [each.token for each in result.prompt_logprobs] == list(prompt[1:])
        for place, each in enumerate(result.prompt_logprobs):
            wanted = float(expected[place, each.token])
            assert each.logprob == pytest.approx(wanted, abs=2e-3, rel=1e-3)
            values = [value for _, value in each.top]
            best = expected[place].topk(3).values.tolist()
            assert values == pytest.approx(best, abs=2e-3, rel=1e-3)
    assert all(result.prompt_logprobs is None for result in results[: len(prompts())])


def test_a_prompt_is_told_once_though_its_answer_waits_for_memory(any_decoder: MakeDecoder) -> None:
    folder = any_decoder("llama")
    sampling = dataclasses.replace(greedy(30), prompt_logprobs=0)
    asked = [GenerateRequest(n, prompt, sampling) for n, prompt in enumerate(crowd())]
    engine = Engine(
        EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128, cache_tokens=96)
    )
    list(engine.run([GenerateRequest("short", (5,), greedy(1))]))  # so that memory runs out
    results = dict(engine.run(asked))
    assert engine.counters.preempted > 0
    assert tokens_of(results) == reference(folder, 30, crowd)
    for n, prompt in enumerate(crowd()):
        assert [each.token for each in results[n].prompt_logprobs or ()] == list(prompt[1:])


def test_another_error_of_the_model_is_not_taken_for_a_shortage(any_decoder: MakeDecoder) -> None:
    def fails(ids: torch.Tensor, positions: torch.Tensor) -> bool:
        msg = "a bug"
        raise RuntimeError(msg)

    loop = loop_of(any_decoder("llama"), lambda model: Moody(model, fails))
    with pytest.raises(RuntimeError, match="a bug"):
        drain(loop, asked())


def test_a_row_that_is_not_finite_fails_alone_and_leaves_no_trace(any_decoder: MakeDecoder) -> None:
    folder = any_decoder("llama")
    decoder = load_decoder(EngineConfig(model=folder, kind=Kind.GENERATE))
    healthy = range(len(prompts()) - 1)
    used = {token for n in healthy for token in (*prompts()[n], *reference(folder)[n])}
    poison = next(token for token in prompts()[-1][10:] if token not in used)

    class Sick:
        """Its embedding of one token is not a number, so keys and values are not either."""

        def __call__(self, **inputs: Any) -> Any:
            return model(**inputs)

    with torch.inference_mode():
        found = continuous_forward(decoder, 256)
        assert found is not None
        forward, tokens = found
        model = forward._decoder.model
        model.get_input_embeddings().weight.data[poison] = float("nan")
        forward._decoder = dataclasses.replace(decoder, model=Sick())
    config = EngineConfig(model=folder, kind=Kind.GENERATE, cache_tokens=256, max_sequences=3)
    loop = ContinuousLoop(decoder, forward, tokens, config)
    for _ in range(2):  # the second time in slots that held what is no number
        results = drain(loop, asked())
        failure = results[len(prompts()) - 1]
        assert isinstance(failure, Failure)
        assert failure.reason is FailureReason.NON_FINITE
        for n in healthy:
            result = results[n]
            assert isinstance(result, Generation)
            assert result.token_ids == reference(folder)[n]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.FalconConfig(**GPT_LIKE), "attention interface"),
        (transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4), ""),
        (
            transformers.LlamaConfig(
                **LLAMA_LIKE,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "dynamic",
        ),
    ],
    ids=["falcon", "bloom", "dynamic-rope"],
)
def test_a_model_that_it_does_not_suit_is_padded_and_right(
    tmp_path: Path, config: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, config)
    with caplog.at_level(logging.WARNING):
        engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=128))
    assert engine.status.path == "padded"
    assert reason in caplog.text
    assert "continuous batching does not suit" in caplog.text
    assert tokens_of(dict(engine.run(asked()))) == reference(folder)


def test_a_model_whose_attention_is_answered_wrongly_is_found_out(
    any_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PackedForward.__call__

    def off_by_one(self: PackedForward, step: Any) -> Any:
        sequences, scores = run(self, step)
        return sequences, scores.roll(1, dims=-1)

    monkeypatch.setattr(PackedForward, "__call__", off_by_one)
    engine = Engine(EngineConfig(model=any_decoder("llama"), kind=Kind.GENERATE))
    assert engine.status.path == "padded"


QUESTIONS = [
    "What is the capital of {}?", "Name three cities of {} and say one word about each.",
    "Write one sentence about the weather in {}.", "Which language is spoken in {}?",
]  # fmt: skip
COUNTRIES = [
    "France",
    "Japan",
    "Brazil",
    "Kenya",
    "Canada",
    "India",
    "Spain",
    "Italy",
    "Greece",
    "Egypt",
    "Chile",
    "Peru",
    "Mexico",
    "Cuba",
    "Norway",
    "Sweden",
    "Finland",
    "Poland",
    "Ghana",
    "Nepal",
    "China",
    "Vietnam",
    "Turkey",
    "Iran",
    "Ireland",
]


def test_real_answers_equal_those_of_transformers(smollm: Path) -> None:
    tokenizer = Tokenizer.from_dir(smollm)
    texts = [question.format(country) for question in QUESTIONS for country in COUNTRIES]
    prompts = [
        tuple(tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": text}])))
        for text in texts
    ]
    engine = Engine(EngineConfig(model=smollm, kind=Kind.GENERATE, prefill_tokens=256))
    assert engine.status.path == "packed"
    requests = [GenerateRequest(n, prompt, greedy(8)) for n, prompt in enumerate(prompts)]
    found = tokens_of(dict(engine.run(requests)))
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert tuple(output[0, len(prompt) :].tolist()) == tokens


def test_padded_batches_remain_for_whoever_asks_for_them(any_decoder: MakeDecoder) -> None:
    config = EngineConfig(model=any_decoder("llama"), kind=Kind.GENERATE)
    loop = GenerateLoop(load_decoder(config), config)
    loop.add(dataclasses.replace(request, id=request.id) for request in asked())
    results: dict[Any, Result] = {}
    with torch.inference_mode():
        while len(results) < len(asked()):
            results |= {result.id: result for result in loop.step().results}
    assert tokens_of(results) == reference(any_decoder("llama"))
