"""Does every parameter of a body reach the engine, and what it asked for the client?"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import (
    Failure,
    FinishReason,
    Generation,
    Grammar,
    GrammarKind,
    Sampling,
    TokenLogprob,
)
from engine.stub import StubTokenizer
from engine.surface import TokenizerLike
from engine.tokenizer import Tokenizer
from service.bodies.check import InvalidBody, Rules
from service.catalog import DEFAULT_CATALOG, Catalog, Model
from tests.typed import exactly
from tests.unit.engine.test_calls import HERMES, MISTRAL, PLAIN
from worker import plan, prompts
from worker.answers import answered
from worker.prompts import Generate

RULES = Rules(max_inputs=9)
MakeDecoder = Callable[[str], Path]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "Is grass green? Answer yes or no."}]


def model() -> Model:
    found = Catalog.load(DEFAULT_CATALOG).get("smollm2-135m-instruct")
    assert found is not None
    return found


def read(tokenizer: TokenizerLike, endpoint: str, **given: Any) -> Generate:
    prompt = prompts.read(
        {"model": "m", **given},
        endpoint=endpoint,
        model=model(),
        tokenizer=tokenizer,
        rules=RULES,
        line_seed=7,
    )
    assert isinstance(prompt, Generate)
    return prompt


def body_of(engine: Engine, prompt: Generate) -> Mapping[str, Any]:
    found: dict[int, Generation] = {}
    for index, result in engine.run(prompts.requests(prompt, key="line")):
        assert isinstance(result, Generation), result
        found[index] = result
    results = [found[n] for n in range(len(found))]
    body = answered(1, "c", prompt, results, labels=(), created=5).body
    parsed: Mapping[str, Any] = json.loads(json.dumps(body))
    return parsed


class Real:
    """A real model and all that it takes to answer a body."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE))
        self.tokenizer = Tokenizer.from_dir(folder)

    def chat(self, **given: Any) -> ChatCompletion:
        body = body_of(self.engine, read(self.tokenizer, CHAT, messages=USER, **given))
        return exactly(ChatCompletion, {k: v for k, v in body.items() if k != "halfrate"})

    def raw(self, endpoint: str, **given: Any) -> Mapping[str, Any]:
        return body_of(self.engine, read(self.tokenizer, endpoint, **given))


@pytest.fixture(scope="module")
def real(smollm: Path) -> Real:
    return Real(smollm)


def test_every_parameter_reaches_the_engine() -> None:
    given = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": "x",
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "logit_bias": {"5": -1, "6": 2.5},
        "min_tokens": 2,
        "ignore_eos": True,
        "regex": "a+",
    }
    expected = Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=("x",),
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        logit_bias=((5, -1.0), (6, 2.5)),
        min_tokens=2,
        ignore_eos=True,
        grammar=Grammar(GrammarKind.REGEX, "a+"),
        logprobs=3,
    )
    stub = StubTokenizer()
    chat = read(stub, CHAT, messages=USER, logprobs=True, top_logprobs=3, **given)
    assert chat.sampling == expected
    assert read(stub, COMPLETIONS, prompt="x", logprobs=3, **given).sampling == expected
    plain = Sampling(max_tokens=model().default_max_tokens, seed=7)
    assert read(stub, CHAT, messages=USER, top_k=-1, logprobs=False).sampling == plain
    assert read(stub, COMPLETIONS, prompt="x").sampling == plain


def test_a_choice_is_the_likeliest_label_and_all_are_told(real: Real) -> None:
    labels = ["yes", "no", "maybe not", "maybe"]
    body = real.raw(CHAT, messages=USER, choice=labels, n=2)
    told = body["halfrate"]["labels"]
    assert len(told) == 1
    probabilities = told[0]["probabilities"]
    assert list(probabilities) == labels
    assert sum(probabilities.values()) == pytest.approx(1)
    best = max(probabilities, key=lambda label: probabilities[label])
    assert [choice["message"]["content"] for choice in body["choices"]] == [best, best]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}

    theirs = AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(real.folder)
    begin = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert body["usage"]["prompt_tokens"] == len(begin)
    for label in labels:
        ids = tokenizer.encode(label, add_special_tokens=False)
        # "maybe" is the beginning of another label, so it is one only if the text ends there.
        ids = [*ids, tokenizer.eos_token_id] if label == "maybe" else ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*begin, *ids]])).logits[0]
        steps = torch.log_softmax(logits[len(begin) - 1 : -1], dim=-1)
        expected = float(sum(steps[n, token] for n, token in enumerate(ids)))
        assert told[0]["logprobs"][label] == pytest.approx(expected, abs=1e-3)


def test_labels_are_drawn_by_their_probabilities_where_a_temperature_is_given(real: Real) -> None:
    body = real.raw(CHAT, messages=USER, choice=["yes", "no"], n=64, temperature=1, seed=1)
    said = [choice["message"]["content"] for choice in body["choices"]]
    share = body["halfrate"]["labels"][0]["probabilities"]["yes"]
    assert 64 * share - 14 < said.count("yes") < 64 * share + 14
    again = real.raw(CHAT, messages=USER, choice=["yes", "no"], n=64, temperature=1, seed=1)
    assert [choice["message"]["content"] for choice in again["choices"]] == said


SENTIMENT = {
    "type": "object",
    "properties": {"sentiment": {"type": "string", "enum": ["good", "bad"]}},
    "required": ["sentiment"],
    "additionalProperties": False,
}


def schema(inner: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": "n", "schema": inner, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def test_a_schema_of_one_enum_is_answered_by_scores(real: Real) -> None:
    body = real.raw(CHAT, messages=USER, **schema(SENTIMENT))
    told = body["halfrate"]["labels"][0]["probabilities"]
    assert set(told) == {"good", "bad"}
    said = json.loads(body["choices"][0]["message"]["content"])
    assert said == {"sentiment": max(told, key=lambda label: told[label])}
    alone = real.raw(CHAT, messages=USER, **schema({"enum": ["good", "bad"]}))
    assert json.loads(alone["choices"][0]["message"]["content"]) in ("good", "bad")


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True},
        {"logit_bias": {"5": -100}},
        {"stop": "zzz"},
        {"max_tokens": 1},
        {"repetition_penalty": 1.2},
    ],
)
def test_a_choice_is_written_where_something_changes_its_tokens(
    real: Real, more: dict[str, Any]
) -> None:
    prompt = read(real.tokenizer, CHAT, messages=USER, choice=["yes", "no way"], **more)
    assert prompt.labels is None
    body = body_of(real.engine, prompt)
    assert "halfrate" not in body
    said = body["choices"][0]
    assert said["message"]["content"] in (
        {"yes", "no"} if "max_tokens" in more else {"yes", "no way"}
    )


def test_a_form_of_every_kind_is_kept(real: Real) -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    said = real.chat(**schema(person), max_tokens=80, temperature=0).choices[0]
    assert said.finish_reason == "stop"
    assert set(json.loads(said.message.content or "")) == {"name", "age"}
    said = real.chat(regex=r"\d{4}-\d{2}", temperature=0).choices[0]
    assert re.fullmatch(r"\d{4}-\d{2}", said.message.content or "")
    said = real.chat(grammar='start: "<" /[a-z]{1,8}/ ">"', temperature=0).choices[0]
    assert re.fullmatch(r"<[a-z]{1,8}>", said.message.content or "")
    text = {"format": {"type": "json_schema", "name": "n", "schema": person}}
    body = real.raw(RESPONSES, input="Who?", text=text, temperature=0, max_output_tokens=80)
    assert set(json.loads(body["output"][0]["content"][0]["text"])) == {"name", "age"}
    assert body["text"]["format"] == text["format"]


def test_a_grammar_that_does_not_compile_is_told_by_the_clients_name(real: Real) -> None:
    for given, param, why in [
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"grammar": "begin: A"}, "grammar", "start"),
        (schema({"type": "strinx"}), "response_format", "strinx"),
    ]:
        prompt = read(real.tokenizer, CHAT, messages=USER, **given)
        [(_, failure)] = real.engine.run(prompts.requests(prompt, key="line"))
        assert isinstance(failure, Failure)
        assert prompts.param_of(prompt, failure.param, position=0) == param
        assert why in failure.message


def test_log_probabilities_are_told_of_the_tokens_of_the_text(real: Real) -> None:
    said = real.chat(logprobs=True, top_logprobs=2, temperature=0, max_tokens=8).choices[0]
    assert said.logprobs is not None
    content = said.logprobs.content or []
    assert "".join(each.token for each in content) == said.message.content
    for each in content:
        assert bytes(each.bytes or ()).decode() == each.token
        assert len(each.top_logprobs) == 2
        assert each.top_logprobs[0].token == each.token  # greedy
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)
        assert each.logprob <= 0
    body = real.raw(
        COMPLETIONS, prompt="One, two, three,", logprobs=3, temperature=0, max_tokens=6, stop=" six"
    )
    choice = exactly(Completion, body).choices[0]
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]
    assert {len(top) for top in choice.logprobs.top_logprobs or []} == {3}


def test_bytes_of_half_characters_are_told() -> None:
    stub = StubTokenizer()
    prompt = read(stub, COMPLETIONS, prompt="é", logprobs=1)
    answer = Generation(
        "id", "é", (195, 169, 257), FinishReason.STOP, 3, 0, 3,
        logprobs=tuple(TokenLogprob(n, float("-inf"), ((n, -0.5),)) for n in (195, 169, 257)),
    )  # fmt: skip
    body = answered(1, "c", prompt, [answer], labels=(), created=5).body
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["\\xc3", "\\xa9"],
        "token_logprobs": [-9999.0, -9999.0],
        "top_logprobs": [{"\\xc3": -0.5}, {"\\xa9": -0.5}],
        "text_offset": [0, 0],
    }


def test_an_echo_is_the_prompt_before_each_answer(real: Real) -> None:
    ids = real.tokenizer.encode_prompt("Two and two")
    for given in (["One and", "Two and"], [ids, ids[:2]]):
        body = real.raw(COMPLETIONS, prompt=given, echo=True, n=2, max_tokens=2, temperature=0)
        plain = real.raw(COMPLETIONS, prompt=given, n=2, max_tokens=2, temperature=0)
        begun = given if isinstance(given[0], str) else ["Two and two", "Two and"]
        for n, choice in enumerate(body["choices"]):
            assert choice["text"] == begun[n // 2] + plain["choices"][n]["text"]
        assert body["usage"] == plain["usage"]


def test_an_echoed_prompt_tells_its_log_probabilities(real: Real) -> None:
    text = "The capital of France is Paris, and the capital of Japan is Tokyo."
    ids = tuple(real.tokenizer.encode_prompt(text))
    other = "The capital of France is Lima."
    given = {"echo": True, "logprobs": 2, "n": 2, "max_tokens": 3, "temperature": 0}
    body = real.raw(COMPLETIONS, prompt=[text, other], **given)
    assert body["choices"][0] == {
        **body["choices"][1],
        "index": 0,
    }  # both choices have the prompt's
    told = body["choices"][0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(real.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    found = told["token_logprobs"][1 : len(ids)]
    wanted = [float(expected[n, token]) for n, token in enumerate(ids[1:])]
    assert found == pytest.approx(wanted, abs=1e-3)
    for place, top in enumerate(told["top_logprobs"][1 : len(ids)]):
        assert sorted(top.values()) == pytest.approx(
            sorted(expected[place].topk(2).values.tolist()), abs=1e-3
        )
    whole = body["choices"][0]["text"]
    assert whole.startswith(text)
    assert len(told["tokens"]) == len(ids) + 3
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert whole[offset:].startswith(token)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    by_ids = real.raw(COMPLETIONS, prompt=[list(ids)], **given)
    assert by_ids["choices"][0]["logprobs"]["tokens"] == told["tokens"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 3},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def caller(make_decoder: MakeDecoder, tmp_path: Path) -> Callable[[str], Real]:
    """A tiny random model with a template that has tools."""

    def make(template: str) -> Real:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for file in make_decoder("llama").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        marked = template.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
        (folder / "chat_template.jinja").write_text(marked)
        return Real(folder)

    return make


@pytest.mark.parametrize("template", [HERMES, PLAIN], ids=["tagged", "plain"])
def test_a_call_that_must_be_made_is_made_rightly(
    caller: Callable[[str], Real], template: str
) -> None:
    real = caller(template)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        said = real.chat(
            tools=[CLOCK, WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=600
        ).choices[0]
        assert said.finish_reason == "tool_calls"
        assert said.message.content is None
        [call] = said.message.tool_calls or []
        assert call.type == "function"
        assert call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        assert call.function.name in ({"weather"} if choice is named else {"weather", "clock"})
        if call.function.name == "weather":
            assert set(arguments) == {"place", "unit"}
            assert arguments["unit"] in ("C", "F")


def test_several_calls_are_made_where_the_template_writes_several(
    caller: Callable[[str], Real],
) -> None:
    real = caller(HERMES)
    prompt = read(
        real.tokenizer, CHAT, messages=USER, tools=[WEATHER], tool_choice="required", max_tokens=99
    )
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"place": "x", "unit": "C"}}\n</tool_call>'
    )
    text = f"{call}\n{call}"
    answer = Generation("id", text, (5,), FinishReason.STOP, 3, 0, 1)
    message = answered(1, "c", prompt, [answer], labels=(), created=5).body["choices"][0]
    assert len(message["message"]["tool_calls"]) == 2
    assert prompt.form is not None
    assert accepts(real, prompt.form.grammar, text)
    assert accepts(real, prompt.form.grammar, call)
    assert not accepts(real, prompt.form.grammar, call[:-1])
    assert not accepts(real, prompt.form.grammar, f"Hm. {call}")


def test_a_call_that_may_be_made_is_held_to_its_schema_once_it_begins(
    caller: Callable[[str], Real],
) -> None:
    for template, sign, key in (
        (HERMES, "<tool_call>\n", "arguments"),
        (PLAIN, "", "parameters"),
    ):
        real = caller(template)
        form = read(real.tokenizer, CHAT, messages=USER, tools=[WEATHER]).form
        assert form is not None
        call = f'{sign}{{"name": "weather", "{key}": {{"place": "x", "unit": "C"}}}}'
        end = "\n</tool_call>" if sign else ""
        assert accepts(real, form.grammar, call + end)
        assert accepts(real, form.grammar, "It is sunny.\n")
        assert not accepts(real, form.grammar, call.replace("weather", "whether") + end)
        assert not accepts(real, form.grammar, call.replace('"C"', '"K"') + end)
        if sign:
            assert accepts(real, form.grammar, f"Let me look.\n{call}{end}\n{call}{end}")
            assert not accepts(real, form.grammar, f"Let me look.\n{call}{end}\n{call}")


def test_listed_calls_behind_a_special_token_are_made_and_read(
    caller: Callable[[str], Real],
) -> None:
    """As Mistral's models call: the token is no text, and each call has an id of its own."""
    real = caller(MISTRAL.replace("[TOOL_CALLS]", "<s>"))
    form = real.tokenizer.calls
    assert form is not None
    assert form.token == 1
    said = real.chat(tools=[WEATHER], tool_choice="required", max_tokens=600).choices[0]
    assert said.finish_reason == "tool_calls"
    assert said.message.content is None
    for call in said.message.tool_calls or []:
        assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
        assert set(json.loads(call.function.arguments)) == {"place", "unit"}
    # They can be sent back with their ids, of which the template is particular.
    turn = {"role": "assistant", "tool_calls": [c.model_dump() for c in said.message.tool_calls]}
    answers = [
        {"role": "tool", "tool_call_id": c.id, "content": "1"} for c in said.message.tool_calls
    ]
    prompt = read(real.tokenizer, CHAT, messages=[*USER, turn, *answers], tools=[WEATHER])
    assert prompt.form is not None
    one = '{"name": "weather", "arguments": {"place": "x", "unit": "C"}, "id": "abc123DEF"}'
    grammar = prompt.form.grammar
    assert accepts(real, grammar, f"Let me look.<s> [{one}, {one}]")
    assert accepts(real, grammar, f"<s> [{one}]")
    assert accepts(real, grammar, "[1, 2] is a list.")
    assert not accepts(real, grammar, f"<s> [{one}, ]")
    assert not accepts(real, grammar, f"<s> [{one.replace('abc123DEF', 'abc')}]")
    assert not accepts(real, grammar, f"<s> [{one.replace('weather', 'whether')}]")
    written = f" [{one}, {one}]"
    for tokens, count in (((1, 5), 2), ((5,), 0)):  # without the token it is a text like any other
        answer = Generation("id", written, tokens, FinishReason.STOP, 3, 0, 1)
        message = answered(1, "c", prompt, [answer], labels=(), created=5).body["choices"][0]
        assert len(message["message"].get("tool_calls", [])) == count


def accepts(real: Real, grammar: Grammar, text: str) -> bool:
    """Whether that text can be a whole answer."""
    guide = real.engine._grammars.guide(grammar)  # type: ignore[union-attr]  # it generates
    for token in real.tokenizer.encode_rendered(text):
        if guide.ended or guide.barred(300)[token]:
            return False
        guide.accept(token)
    return guide.ended or not guide.barred(300)[2]


def test_a_conversation_with_calls_is_written_by_the_template(
    caller: Callable[[str], Real],
) -> None:
    real = caller(HERMES)
    call = {"id": "c", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    told = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    prompt = read(real.tokenizer, CHAT, messages=told, tools=[CLOCK])
    text = real.tokenizer.decode(prompt.sequences[0])
    assert '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\nnoon" in text
    assert '"name": "clock"' in text.split("</tools>")[0]
    without = read(real.tokenizer, CHAT, messages=told, tools=[CLOCK], tool_choice="none")
    assert without.form is None
    assert "<tools>" not in real.tokenizer.decode(without.sequences[0])


def test_a_model_whose_template_has_no_tools_refuses_them(real: Real) -> None:
    assert real.tokenizer.calls is None
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
    }
    for given, param in (
        ({"tools": [CLOCK]}, "tools"),
        ({"messages": [*USER, turn]}, "messages.1.tool_calls"),
    ):
        with pytest.raises(InvalidBody) as caught:
            read(real.tokenizer, CHAT, **{"messages": USER, **given})
        assert (caught.value.fault.param, caught.value.fault.code) == (
            param,
            "unsupported_parameter",
        )
    assert read(real.tokenizer, CHAT, messages=USER, tools=[CLOCK], tool_choice="none").form is None


def test_labels_cost_the_plan_their_prompt_and_a_little(real: Real) -> None:
    written = read(real.tokenizer, CHAT, messages=USER)
    labelled = read(real.tokenizer, CHAT, messages=USER, choice=["yes", "no", "I do not know"])
    length = len(written.sequences[0])
    assert labelled.labels is not None
    assert plan.weigh(labelled)[0] == length + labelled.labels.tree.tokens
    assert plan.weigh(labelled)[0] < length + 8
    assert plan.weigh(labelled)[1] == plan.weigh(written)[1]
