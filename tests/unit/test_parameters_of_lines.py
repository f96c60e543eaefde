"""Does every parameter of a generating line change what the engine is asked, or is it refused?"""

from typing import Any

import pytest

from engine.calls import CallForm
from engine.stub import StubTokenizer
from service.bodies.check import SHAPES, InvalidBody, Rules
from service.catalog import Model, ModelKind
from tests.parameters_table import NO_EFFECT, is_refused
from worker import prompts
from worker.prompts import Generate

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
TOOL = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

# Of each parameter a value that asks for something, and one that cannot be: by its own name.
SAMPLED: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 9),
    "top_p": (0.5, 1.5),
}
SEQUENCED: dict[str, tuple[Any, Any]] = {
    **SAMPLED,
    "top_k": (5, -2),
    "min_p": (0.2, 2),
    "presence_penalty": (0.5, 3),
    "frequency_penalty": (0.5, -3),
    "repetition_penalty": (1.2, 0),
    "logit_bias": ({"5": 1.5}, {"five": 1}),
    "seed": (5, 0.5),
    "n": (2, 0),
    "stop": (["x"], [""]),
    "max_tokens": (5, 0),
    "ignore_eos": (True, "yes"),
    "min_tokens": (2, -1),
    "choice": (["a", "b"], ["a", "a"]),
    "regex": ("a+", ""),
    "grammar": ('start: "a"', ""),
}
HONOURED: dict[str, dict[str, tuple[Any, Any]]] = {
    CHAT: {
        **SEQUENCED,
        "messages": ([{"role": "system", "content": "y"}, *BASE[CHAT]["messages"]], []),
        "max_completion_tokens": (5, 0),
        "logprobs": (True, 1),
        "top_logprobs": (2, 21),
        "response_format": (FORMAT, {"type": "yaml"}),
        "tools": ([TOOL], [{"type": "retrieval"}]),
        "tool_choice": ("required", "always"),
        "parallel_tool_calls": (False, "no"),
    },
    COMPLETIONS: {
        **SEQUENCED,
        "prompt": (["x", "y"], []),
        "echo": (True, "no"),
        "logprobs": (2, 6),
        "best_of": (3, 21),
    },
    RESPONSES: {
        **SAMPLED,
        "input": ([{"role": "user", "content": "y"}], []),
        "instructions": ("be brief", 5),
        "max_output_tokens": (5, 0),
        "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "json"),
    },
}
# What a parameter needs beside it to ask for anything.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "echo": {"logprobs": 1},
}

ALL = [(endpoint, name) for endpoint, names in HONOURED.items() for name in names]


class Caller(StubTokenizer):
    """Its template would have a place for tools."""

    calls = CallForm('{"name": "', '", "arguments": ', "}", "\n")

    def render_chat(self, messages: list[dict[str, Any]], *, tools: Any = ()) -> str:
        return super().render_chat(messages) + repr(tools)


def read(endpoint: str, **given: Any) -> Generate:
    prompt = prompts.read(
        {"model": "m", **BASE[endpoint], **given},
        endpoint=endpoint,
        model=Model(id="m", kind=ModelKind.GENERATE, source="stub:", price_input="1"),
        tokenizer=Caller(),
        rules=Rules(max_inputs=9),
        line_seed=7,
    )
    assert isinstance(prompt, Generate)
    return prompt


def asked(prompt: Generate) -> Any:
    """All that the body makes the engine do."""
    requests = prompts.requests(prompt, key="k")
    return requests, prompt.told, prompt.form, prompt.labels


@pytest.mark.parametrize(("endpoint", "name"), ALL)
def test_a_parameter_changes_what_is_asked_of_the_engine(endpoint: str, name: str) -> None:
    beside = BESIDE.get(name, {})
    with_it = read(endpoint, **beside, **{name: HONOURED[endpoint][name][0]})
    assert asked(with_it) != asked(read(endpoint, **beside))


@pytest.mark.parametrize(("endpoint", "name"), ALL)
def test_a_value_that_cannot_be_is_refused_by_its_name(endpoint: str, name: str) -> None:
    with pytest.raises(InvalidBody) as raised:
        read(endpoint, **BESIDE.get(name, {}), **{name: HONOURED[endpoint][name][1]})
    param = raised.value.fault.param
    assert param is not None
    assert param.split(".")[0] == name
    assert name in raised.value.fault.message


@pytest.mark.parametrize("endpoint", HONOURED)
def test_no_parameter_is_left_out(endpoint: str) -> None:
    fields = SHAPES[endpoint].model_fields
    known = {name for name, field in fields.items() if not is_refused(field.annotation)}
    assert known - NO_EFFECT - {"model"} == set(HONOURED[endpoint])


@pytest.mark.parametrize("endpoint", HONOURED)
def test_what_is_not_honoured_is_refused_by_its_name(endpoint: str) -> None:
    """The values are those that ask for something; the others are as absent."""
    asking = {
        "stream": True, "stream_options": {"include_usage": True}, "suffix": "x", "audio": {},
        "modalities": ["audio"], "functions": [{"name": "f"}], "function_call": "f",
        "prediction": {"type": "content", "content": "x"}, "reasoning_effort": "high",
        "verbosity": "low", "web_search_options": {}, "moderation": {"model": "m"},
    }  # fmt: skip
    fields = SHAPES[endpoint].model_fields
    refused = {name for name in asking if name in fields and is_refused(fields[name].annotation)}
    assert refused
    for name in refused:
        with pytest.raises(InvalidBody) as raised:
            read(endpoint, **{name: asking[name]})
        assert raised.value.fault.param == name
    with pytest.raises(InvalidBody) as raised:
        read(endpoint, beam_width=3)
    assert raised.value.fault.param == "beam_width"
