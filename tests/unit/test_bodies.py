"""Does a faulty body get a 400 that names the parameter, and is nothing ignored silently?"""

from typing import Any

import pytest

from service import bodies
from service.bodies import InvalidBody
from service.faults import Fault

INPUTS = 5
MESSAGES = [{"role": "user", "content": "x"}]


def chat(**given: Any) -> bodies.ChatBody:
    return bodies.chat({"model": "m", "messages": MESSAGES, **given})


def completion(prompt: Any = "x", **given: Any) -> bodies.CompletionBody:
    return bodies.completion({"model": "m", "prompt": prompt, **given})


def embeddings(text: Any = "x", **given: Any) -> bodies.EmbeddingsBody:
    return bodies.embeddings({"model": "m", "input": text, **given}, max_inputs=INPUTS)


def fault_of(call: Any, *args: Any, **given: Any) -> Fault:
    with pytest.raises(InvalidBody) as caught:
        call(*args, **given)
    fault = caught.value.fault
    assert fault.param is not None
    assert f"'{fault.param}'" in fault.message
    assert fault.message.endswith(".")
    # Words of the program's own types help nobody who sent JSON.
    for word in ("dictionary", "instance", "Strict", "TextPart", "validation error", "None"):
        assert word not in fault.message
    return fault


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("temperature", 9, "invalid_value"),
        ("temperature", -0.1, "invalid_value"),
        ("temperature", "1", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("temperature", float("inf"), "invalid_value"),
        ("top_p", 0, "invalid_value"),
        ("top_p", 1.01, "invalid_value"),
        ("top_p", [], "invalid_type"),
        ("max_tokens", 0, "invalid_value"),
        ("max_tokens", -5, "invalid_value"),
        ("max_tokens", 1.5, "invalid_type"),
        ("max_tokens", "4", "invalid_type"),
        ("max_tokens", True, "invalid_type"),
        ("n", 0, "invalid_value"),
        ("n", bodies.MAX_CHOICES + 1, "invalid_value"),
        ("n", "2", "invalid_type"),
        ("seed", 2.5, "invalid_type"),
        ("seed", 2**63, "invalid_value"),
        ("seed", -(2**63) - 1, "invalid_value"),
        ("stop", 5, "invalid_type"),
        ("stop", "", "invalid_value"),
        ("stop", ["a"] * (bodies.MAX_STOPS + 1), "invalid_value"),
    ],
)
@pytest.mark.parametrize("call", [chat, completion])
def test_a_sampling_parameter_out_of_range_is_named(
    call: Any, name: str, value: object, code: str
) -> None:
    fault = fault_of(call, **{name: value})
    assert (fault.param or "").split(".")[0] == name
    assert fault.code == code


@pytest.mark.parametrize("call", [chat, completion])
def test_values_at_the_ends_of_the_ranges_are_taken(call: Any) -> None:
    for given in (
        {"temperature": 0, "top_p": 1, "n": bodies.MAX_CHOICES, "max_tokens": 1},
        {"temperature": 2.0, "top_p": 1e-9, "seed": 2**63 - 1, "stop": ["a"] * bodies.MAX_STOPS},
        {"seed": -(2**63), "stop": "one", "max_tokens": 2**40},
    ):
        body = call(**given)
        for name, value in given.items():
            expected = [value] if name == "stop" and isinstance(value, str) else value
            assert getattr(body, name) == expected


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ("hello", "messages", "invalid_type"),
        ({"role": "user"}, "messages", "invalid_type"),
        ([], "messages", "invalid_value"),
        ([5], "messages.0", "invalid_type"),
        (["hello"], "messages.0", "invalid_type"),
        ([{}], "messages.0.role", "missing_required_parameter"),
        ([{"role": "user"}], "messages.0.content", "missing_required_parameter"),
        ([*MESSAGES, {"role": "user", "content": 7}], "messages.1.content", "invalid_type"),
        ([{"role": "user", "content": []}], "messages.0.content", "invalid_type"),
        ([{"role": "user", "content": {}}], "messages.0.content", "invalid_type"),
        ([{"role": "tool", "content": "x"}], "messages.0.role", "invalid_value"),
        ([{"role": 1, "content": "x"}], "messages.0.role", "invalid_value"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages.0.content.0.type",
            "invalid_value",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages.0.content.0.text",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{}]}],
            "messages.0.tool_calls",
            "unknown_parameter",
        ),
    ],
)
def test_a_fault_in_the_messages_is_named_by_its_place(
    messages: Any, param: str, code: str
) -> None:
    fault = fault_of(chat, messages=messages)
    assert (fault.param, fault.code) == (param, code)


def test_messages_of_text_parts_are_their_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": parts}])
    assert body.messages[0].text == "ab"


def test_a_message_of_an_answer_can_be_sent_again_as_it_came() -> None:
    came = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert chat(messages=[*MESSAGES, came]).messages[1].text == "x"


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ("", "", "invalid_value"),
        ([], "", "invalid_value"),
        (["a", ""], "", "invalid_value"),
        ([[]], "", "invalid_value"),
        ([[1], []], "", "invalid_value"),
        (5, "", "invalid_type"),
        ({"a": 1}, "", "invalid_type"),
        (True, "", "invalid_type"),
        (["a", 1], ".1", "invalid_type"),
        ([1.5], ".0", "invalid_type"),
        ([None], ".0", "invalid_type"),
        ([True], ".0", "invalid_type"),
        ([-1], ".0", "invalid_value"),
        ([1, 2**31], ".1", "invalid_value"),
        ([[1], [-1]], ".1.0", "invalid_value"),
    ],
)
@pytest.mark.parametrize(("call", "name"), [(embeddings, "input"), (completion, "prompt")])
def test_a_fault_in_what_a_body_is_about_is_named_as_the_client_wrote_it(
    call: Any, name: str, value: object, param: str, code: str
) -> None:
    fault = fault_of(call, value)
    assert (fault.param, fault.code) == (name + param, code)


def test_texts_and_tokens_come_as_lists_however_they_were_written() -> None:
    for call, name in ((embeddings, "input"), (completion, "prompt")):
        assert getattr(call("x"), name) == ["x"]
        assert getattr(call(["x", "y"]), name) == ["x", "y"]
        assert getattr(call([1, 2]), name) == [[1, 2]]
        assert getattr(call([[1], [2, 3]]), name) == [[1], [2, 3]]


def test_the_number_of_inputs_has_a_limit_that_is_told() -> None:
    assert len(embeddings(["x"] * INPUTS).input) == INPUTS
    assert embeddings([7] * 100).input == [[7] * 100]
    fault = fault_of(embeddings, ["x"] * (INPUTS + 1))
    assert (fault.param, fault.code) == ("input", "invalid_value")
    assert str(INPUTS) in fault.message
    assert str(INPUTS + 1) in fault.message


def test_the_number_of_prompts_has_a_limit() -> None:
    assert fault_of(completion, ["x"] * (bodies.MAX_PROMPTS + 1)).param == "prompt"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("dimensions", 0, "invalid_value"),
        ("dimensions", "5", "invalid_type"),
        ("dimensions", 2.0, "invalid_type"),
        ("encoding_format", "hex", "invalid_value"),
        ("encoding_format", 1, "invalid_value"),
        ("temperature", 0.5, "unknown_parameter"),
        ("truncate", True, "unknown_parameter"),
    ],
)
def test_a_fault_of_an_embeddings_body_is_named(name: str, value: object, code: str) -> None:
    fault = fault_of(embeddings, **{name: value})
    assert (fault.param, fault.code) == (name, code)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 5),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("modalities", ["audio"]),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
        ("stream", True),
        ("stream", "yes"),
        ("stream", 1),
    ],
)
@pytest.mark.parametrize("call", [chat, completion])
def test_what_the_engine_does_not_honour_is_refused(call: Any, name: str, value: object) -> None:
    fault = fault_of(call, **{name: value})
    assert (fault.param, fault.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in bodies.NEUTRAL.items() for value in values]
    + [("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("best_of", 1.0)],
)
@pytest.mark.parametrize("call", [chat, completion])
def test_a_value_that_asks_for_nothing_is_taken(call: Any, name: str, value: object) -> None:
    assert call(**{name: value}) == call()


@pytest.mark.parametrize("name", sorted(bodies.HARMLESS))
@pytest.mark.parametrize("call", [chat, completion, embeddings])
def test_a_parameter_that_changes_no_answer_is_taken(call: Any, name: str) -> None:
    for value in ("x", 1, {"a": [1]}, None):
        assert call(**{name: value}) == call()


@pytest.mark.parametrize("call", [chat, completion, embeddings])
def test_null_is_as_absent(call: Any) -> None:
    assert call(dimensions=None, temperature=None, logprobs=None, anything=None) == call()


@pytest.mark.parametrize("call", [chat, completion, embeddings])
def test_an_unknown_parameter_is_named(call: Any) -> None:
    fault = fault_of(call, temperatur=0)
    assert (fault.param, fault.code) == ("temperatur", "unknown_parameter")
    assert fault.message == "Unknown parameter: 'temperatur'."
