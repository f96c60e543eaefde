"""Does every loop honour every parameter of a request, as transformers does where it has it?"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.model import grammar as grammars
from engine.request import (
    Failure,
    FailureReason,
    FinishReason,
    GenerateRequest,
    Generation,
    Grammar,
    GrammarKind,
    Result,
    Sampling,
)
from tests.unit.engine.conftest import END

MakeDecoder = Callable[[str], Path]
NEW = 14
PROMPTS = [tuple((7 * n + 3 * length) % 250 + 3 for n in range(length)) for length in (3, 9, 20)]


@pytest.fixture(params=["packed", "padded"])
def engine(
    request: pytest.FixtureRequest, make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """A tiny llama of single bytes, run by either loop."""
    if request.param == "padded":
        monkeypatch.setattr("engine.engine.continuous_forward", lambda *_, **__: None)
    made = Engine(EngineConfig(model=make_decoder("llama"), kind=Kind.GENERATE))
    assert made.status.path == request.param
    return made


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Result]:
    return [result for _, result in sorted(engine.run(requests), key=lambda each: each[0])]


def answers(engine: Engine, prompts: Sequence[tuple[int, ...]], **asked: Any) -> list[Generation]:
    sampling = Sampling(**{"max_tokens": NEW, "temperature": 0.0, **asked})
    requests = [GenerateRequest(n, prompt, sampling) for n, prompt in enumerate(prompts)]
    found = []
    for result in run(engine, requests):
        assert isinstance(result, Generation), result
        found.append(result)
    return found


def failure(engine: Engine, **asked: Any) -> Failure:
    sampling = Sampling(**{"max_tokens": NEW, "temperature": 0.0, **asked})
    [result] = run(engine, [GenerateRequest(0, PROMPTS[0], sampling)])
    assert isinstance(result, Failure)
    return result


def transformers_answers(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            **options,
        )
        found.append(tuple(output[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"repetition_penalty": 1.9}, {"repetition_penalty": 1.9}),
        (
            {"logit_bias": ((40, 30.0), (41, 31.0), (END, -100.0))},
            {"sequence_bias": [[[40], 30.0], [[41], 31.0], [[END], -100.0]]},
        ),
        # Biased to end at once, if it may.
        (
            {"logit_bias": ((END, 100.0),), "min_tokens": 6},
            {"sequence_bias": [[[END], 100.0]], "min_new_tokens": 6},
        ),
    ],
)
def test_greedy_answers_equal_those_of_transformers(
    engine: Engine, make_decoder: MakeDecoder, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = transformers_answers(make_decoder("llama"), **options)
    assert expected != transformers_answers(make_decoder("llama"))
    assert [answer.token_ids for answer in answers(engine, PROMPTS, **asked)] == expected


def test_an_end_that_is_ignored_ends_nothing(engine: Engine) -> None:
    biased = ((END, 100.0),)
    [ended] = answers(engine, PROMPTS[:1], logit_bias=biased)
    [ignored] = answers(engine, PROMPTS[:1], logit_bias=biased, ignore_eos=True)
    assert (ended.token_ids, ended.finish_reason) == ((END,), FinishReason.STOP)
    assert (ignored.token_ids, ignored.finish_reason) == ((END,) * NEW, FinishReason.LENGTH)


def test_penalties_of_count_bring_other_tokens(engine: Engine) -> None:
    bias = ((40, 60.0), (41, 59.0), (42, 58.0))
    [plain] = answers(engine, PROMPTS[:1], logit_bias=bias)
    [often] = answers(engine, PROMPTS[:1], logit_bias=bias, frequency_penalty=2.0, max_tokens=40)
    [once] = answers(engine, PROMPTS[:1], logit_bias=bias, presence_penalty=2.0, max_tokens=40)
    assert len(set(often.token_ids)) > len(set(plain.token_ids))
    assert set(once.token_ids) != set(plain.token_ids)


def test_a_stop_string_counts_from_the_least_length_on(engine: Engine) -> None:
    [plain] = answers(engine, PROMPTS[:1], logit_bias=((40, 200.0),))
    letter = plain.text[0]
    assert plain.text == letter * NEW
    [stopped] = answers(engine, PROMPTS[:1], logit_bias=((40, 200.0),), stop=(letter * 2,))
    assert (stopped.text, stopped.output_tokens) == ("", 2)
    [later] = answers(
        engine, PROMPTS[:1], logit_bias=((40, 200.0),), stop=(letter * 2,), min_tokens=5
    )
    assert (later.text, later.output_tokens) == (letter * 5, 7)
    assert later.finish_reason is FinishReason.STOP


def test_log_probabilities_equal_those_of_a_full_forward(
    engine: Engine, make_decoder: MakeDecoder
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_decoder("llama"), dtype=torch.float32).eval()
    found = answers(engine, PROMPTS, temperature=1.5, seed=4, logprobs=5, candidates=(9, 77))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer.logprobs is not None
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            scores = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(scores, dim=-1)
        assert [told.token for told in answer.logprobs] == list(answer.token_ids)
        for row, told in zip(expected, answer.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[told.token]), abs=2e-3)
            assert [each for _, each in told.top] == pytest.approx(
                row.topk(5).values.tolist(), abs=2e-3
            )
        assert answer.candidates == pytest.approx(expected[0, [9, 77]].tolist(), abs=2e-3)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias"),
        ({"min_tokens": NEW + 1}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1, "grammar": Grammar(GrammarKind.REGEX, "a")}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"candidates": (-1,)}, "candidates"),
        ({"grammar": Grammar(GrammarKind.REGEX, "(a")}, "grammar"),
        ({"grammar": Grammar(GrammarKind.LARK, "start: nothing")}, "grammar"),
        ({"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strinx"}')}, "grammar"),
        ({"grammar": Grammar(GrammarKind.JSON_SCHEMA, "[")}, "grammar"),
        ({"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')}, "grammar"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: Engine, asked: dict[str, Any], param: str
) -> None:
    refused = failure(engine, **asked)
    assert (refused.reason, refused.param) == (FailureReason.INVALID, param)
    assert "\n" not in refused.message


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
# The tiny model would spend its tokens on white space.
BLANK = tuple(
    (3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(each), -100.0) for each in "ĠĊĉ"
)
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_answer_is_a_text_of_its_grammar(engine: Engine, temperature: float) -> None:
    found = answers(
        engine, PROMPTS, grammar=SCHEMA, max_tokens=100, temperature=temperature, logit_bias=BLANK
    )
    for answer in found:
        person = json.loads(answer.text)
        assert list(person) == ["name", "age", "kind"]
        assert len(person["name"]) <= 4
        assert 0 <= person["age"] <= 99
        assert person["kind"] in "ab"
        assert answer.finish_reason is FinishReason.STOP
    for answer in answers(
        engine, PROMPTS, grammar=Grammar(GrammarKind.REGEX, r"[a-c]{3}-\d{2}"), temperature=2.0
    ):
        assert re.fullmatch(r"[a-c]{3}-\d{2}", answer.text)
    lark = Grammar(GrammarKind.LARK, 'start: "yes" | "no"')
    assert {answer.text for answer in answers(engine, PROMPTS, grammar=lark)} <= {"yes", "no"}


def test_an_answer_cut_inside_its_grammar_says_so_and_is_not_mended(engine: Engine) -> None:
    for answer in answers(engine, PROMPTS, grammar=SCHEMA, max_tokens=7):
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.text.lstrip().startswith("{")
        with pytest.raises(json.JSONDecodeError):
            json.loads(answer.text)


def test_a_grammar_of_one_changes_no_neighbour(engine: Engine) -> None:
    plain = answers(engine, PROMPTS)
    grammar = Sampling(max_tokens=90, temperature=0.0, grammar=SCHEMA, logit_bias=BLANK)
    requests = [
        GenerateRequest(("plain", n), prompt, Sampling(max_tokens=NEW, temperature=0.0))
        for n, prompt in enumerate(PROMPTS)
    ]
    requests.append(GenerateRequest("grammar", PROMPTS[1], grammar))
    requests.append(
        GenerateRequest(
            "bad", PROMPTS[1], Sampling(max_tokens=5, grammar=Grammar(GrammarKind.REGEX, "["))
        )
    )
    *found, spelled, bad = run(engine, requests)
    assert [each.token_ids for each in found if isinstance(each, Generation)] == [
        each.token_ids for each in plain
    ]
    assert isinstance(spelled, Generation)
    json.loads(spelled.text)
    assert isinstance(bad, Failure)


def test_a_grammar_is_compiled_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    written = grammars._written

    def noting(grammar: Grammar) -> str:
        compiled.append(grammar)
        return written(grammar)

    monkeypatch.setattr(grammars, "_written", noting)
    answers(engine, [*PROMPTS, *PROMPTS], grammar=SCHEMA, temperature=1.0, max_tokens=20)
    assert compiled == [SCHEMA]


def test_a_grammar_that_becomes_too_much_fails_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = grammars.Guide.accept

    def tire(guide: grammars.Guide, token: int) -> None:
        accept(guide, token)
        guide._wait()
        guide._matcher.consume_token(0)  # puts it into its state of error

    monkeypatch.setattr(grammars.Guide, "accept", tire)
    requests = [
        GenerateRequest(0, PROMPTS[0], Sampling(max_tokens=9, grammar=SCHEMA)),
        GenerateRequest(1, PROMPTS[1], Sampling(max_tokens=9, temperature=0.0)),
    ]
    tired, fine = run(engine, requests)
    assert isinstance(tired, Failure)
    assert (tired.reason, tired.param) == (FailureReason.INVALID, "grammar")
    assert isinstance(fine, Generation)
