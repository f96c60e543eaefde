"""Does a faulty body get a 400 that names the parameter, and is nothing ignored silently?"""

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from service.bodies import check
from service.bodies.chat import ChatBody
from service.bodies.check import InvalidBody, Rules
from service.bodies.completions import MAX_PROMPTS, CompletionBody
from service.bodies.embeddings import EmbeddingsBody
from service.bodies.parameters import MAX_CHOICES, MAX_STOPS
from service.bodies.responses import ResponsesBody
from service.faults import Fault
from service.settings import UnknownParameters

INPUTS = 5
RULES = Rules(max_inputs=INPUTS)
LENIENT = Rules(max_inputs=INPUTS, unknown=UnknownParameters.IGNORE)
MESSAGES = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FAULTY = {"name": "weather", "arguments": "[1]"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a"]}}}


def chat(rules: Rules = RULES, **given: Any) -> ChatBody:
    return check.chat({"model": "m", "messages": MESSAGES, **given}, rules)


def completion(prompt: Any = "x", /, rules: Rules = RULES, **given: Any) -> CompletionBody:
    return check.completion({"model": "m", "prompt": prompt, **given}, rules)


def embeddings(text: Any = "x", /, rules: Rules = RULES, **given: Any) -> EmbeddingsBody:
    return check.embeddings({"model": "m", "input": text, **given}, rules)


def response(text: Any = "x", /, rules: Rules = RULES, **given: Any) -> ResponsesBody:
    return check.response({"model": "m", "input": text, **given}, rules)


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
        ("n", MAX_CHOICES + 1, "invalid_value"),
        ("n", "2", "invalid_type"),
        ("seed", 2.5, "invalid_type"),
        ("seed", 2**63, "invalid_value"),
        ("seed", -(2**63) - 1, "invalid_value"),
        ("stop", 5, "invalid_type"),
        ("stop", "", "invalid_value"),
        ("stop", ["a"] * (MAX_STOPS + 1), "invalid_value"),
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
        {"temperature": 0, "top_p": 1, "n": MAX_CHOICES, "max_tokens": 1},
        {"temperature": 2.0, "top_p": 1e-9, "seed": 2**63 - 1, "stop": ["a"] * MAX_STOPS},
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
        ([{"role": "user", "content": None}], "messages.0.content", "missing_required_parameter"),
        ([{"role": "robot", "content": "x"}], "messages.0.role", "invalid_value"),
        (
            [{"role": "tool", "content": "x"}],
            "messages.0.tool_call_id",
            "missing_required_parameter",
        ),
        (
            [{"role": "user", "content": "x", "tool_call_id": "c"}],
            "messages.0.tool_call_id",
            "invalid_value",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [CALL]}],
            "messages.0.tool_calls",
            "invalid_value",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "function": FAULTY}]}],
            "messages.0.tool_calls.0.function.arguments",
            "invalid_value",
        ),
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
            [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            "messages.0.content.0.type",
            "invalid_value",
        ),
        (
            [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}],
            "messages.1.tool_calls.0.function",
            "missing_required_parameter",
        ),
        (
            [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            "messages.0.function_call",
            "unsupported_parameter",
        ),
        (
            [{"role": "assistant", "content": "", "refusal": "No."}],
            "messages.0.refusal",
            "unsupported_parameter",
        ),
        (
            [{"role": "user", "content": "x", "weight": 1}],
            "messages.0.weight",
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
    came = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": [],
        "audio": None,
        "annotations": [],
        "function_call": None,
    }
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


def test_a_prompt_goes_before_texts_only() -> None:
    assert embeddings(prompt_name="query", truncate=True).prompt_name == "query"
    for tokens in ([1, 2], [[1], [2]]):
        fault = fault_of(embeddings, tokens, prompt_name="query")
        assert (fault.param, fault.code) == ("prompt_name", "invalid_value")


def test_the_number_of_prompts_has_a_limit() -> None:
    assert fault_of(completion, ["x"] * (MAX_PROMPTS + 1)).param == "prompt"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("dimensions", 0, "invalid_value"),
        ("dimensions", "5", "invalid_type"),
        ("dimensions", 2.0, "invalid_type"),
        ("encoding_format", "hex", "invalid_value"),
        ("encoding_format", 1, "invalid_value"),
        ("temperature", 0.5, "unsupported_parameter"),
        ("truncate", 1, "invalid_type"),
        ("prompt_name", "", "invalid_value"),
        ("prompt_name", 1, "invalid_type"),
        ("labels", ["a"], "unsupported_parameter"),
    ],
)
def test_a_fault_of_an_embeddings_body_is_named(name: str, value: object, code: str) -> None:
    fault = fault_of(embeddings, **{name: value})
    assert (fault.param, fault.code) == (name, code)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (chat, "functions", [{"name": "f"}]),
        (chat, "function_call", {"name": "f"}),
        (chat, "modalities", ["audio"]),
        (chat, "modalities", ["text", "audio"]),
        (chat, "audio", {"voice": "v", "format": "wav"}),
        (chat, "prediction", {"type": "content", "content": "x"}),
        (chat, "reasoning_effort", "high"),
        (chat, "verbosity", "low"),
        (chat, "web_search_options", {}),
        (chat, "moderation", {"model": "m"}),
        (completion, "suffix", "x"),
        (response, "background", True),
        (response, "context_management", [{"type": "compaction"}]),
        (response, "conversation", "conv_1"),
        (response, "conversation", {"id": "conv_1"}),
        (response, "include", ["message.output_text.logprobs"]),
        (response, "previous_response_id", "resp_1"),
        (response, "prompt", {"id": "pmpt_1"}),
        (response, "tools", [{"type": "web_search"}]),
        (response, "tool_choice", "required"),
        (response, "top_logprobs", 2),
        (response, "truncation", "auto"),
        *(
            (call, name, value)
            for call in (chat, completion, response)
            for name, value in [("stream", True), ("stream_options", {"include_usage": True})]
        ),
    ],
)
def test_what_the_engine_does_not_honour_is_refused(call: Any, name: str, value: object) -> None:
    fault = fault_of(call, **{name: value})
    assert (fault.param, fault.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("call", "name", "value", "code"),
    [
        (chat, "frequency_penalty", 3, "invalid_value"),
        (chat, "presence_penalty", "0", "invalid_type"),
        (chat, "logit_bias", {"5": 101}, "invalid_value"),
        (chat, "logit_bias", [], "invalid_type"),
        (chat, "logprobs", 0, "invalid_type"),
        (chat, "top_logprobs", 21, "invalid_value"),
        (chat, "tools", {}, "invalid_type"),
        (chat, "tool_choice", 1, "invalid_value"),
        (chat, "tool_choice", "required", "invalid_value"),
        (chat, "tool_choice", {"type": "function", "function": {"name": "f"}}, "invalid_value"),
        (chat, "tools", [{"type": "custom"}], "invalid_value"),
        (chat, "tools", [{"type": "function"}], "missing_required_parameter"),
        (chat, "tools", TOOLS * 2, "invalid_value"),
        (chat, "top_logprobs", 5, "invalid_value"),
        (chat, "response_format", {"type": "json_schema"}, "missing_required_parameter"),
        (chat, "response_format", {"type": "xml"}, "invalid_value"),
        (response, "text", {"format": {"type": "json_schema"}}, "missing_required_parameter"),
        *(
            (call, name, value, code)
            for call in (chat, completion)
            for name, value, code in [
                ("logit_bias", {"a": 1}, "invalid_value"),
                ("logit_bias", {"5": "1"}, "invalid_type"),
                ("top_k", -2, "invalid_value"),
                ("top_k", 1.5, "invalid_type"),
                ("min_p", 1.1, "invalid_value"),
                ("repetition_penalty", 0, "invalid_value"),
                ("min_tokens", -1, "invalid_value"),
                ("ignore_eos", 1, "invalid_type"),
                ("choice", [], "invalid_value"),
                ("choice", ["a", "a"], "invalid_value"),
                ("choice", ["a", ""], "invalid_value"),
                ("choice", "a", "invalid_type"),
                ("regex", "", "invalid_value"),
                ("grammar", 1, "invalid_type"),
            ]
        ),
        (chat, "response_format", "json", "invalid_type"),
        (chat, "modalities", "text", "invalid_type"),
        (chat, "verbosity", "loud", "invalid_value"),
        (chat, "stream", "yes", "invalid_type"),
        (chat, "stream", 1, "invalid_type"),
        (completion, "logprobs", 6, "invalid_value"),
        (completion, "logprobs", False, "invalid_type"),
        (completion, "best_of", 21, "invalid_value"),
        (completion, "echo", "no", "invalid_type"),
        (response, "max_output_tokens", 0, "invalid_value"),
        (response, "instructions", ["x"], "invalid_type"),
        (response, "text", "json", "invalid_type"),
        (response, "truncation", "some", "invalid_value"),
        (response, "temperature", 2.1, "invalid_value"),
        *(
            (call, name, value, code)
            for call in (chat, completion, embeddings, response)
            for name, value, code in [
                ("user", 5, "invalid_type"),
                ("store", "yes", "invalid_type"),
                ("metadata", [], "invalid_type"),
                ("metadata", {f"key {n}": "" for n in range(17)}, "invalid_value"),
                ("service_tier", 1, "invalid_type"),
                ("safety_identifier", {}, "invalid_type"),
                ("prompt_cache_key", 1, "invalid_type"),
            ]
        ),
    ],
)
def test_every_parameter_has_its_type_and_range(
    call: Any, name: str, value: object, code: str
) -> None:
    fault = fault_of(call, **{name: value})
    assert (str(fault.param).split(".")[0], fault.code) == (name, code)


def test_a_fault_inside_the_metadata_is_named_by_its_place() -> None:
    assert fault_of(chat, metadata={"tags": ["a"]}).param == "metadata.tags"
    assert fault_of(chat, metadata={"tags": "x" * 513}).param == "metadata.tags"
    assert fault_of(chat, metadata={"k" * 65: "x"}).param == "metadata"


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (chat, "functions", []),
        (chat, "modalities", ["text"]),
        (chat, "reasoning_effort", "none"),
        (chat, "verbosity", "medium"),
        (completion, "suffix", ""),
        (response, "background", False),
        (response, "include", []),
        (response, "context_management", []),
        (response, "parallel_tool_calls", False),
        (response, "tools", []),
        (response, "tool_choice", "auto"),
        (response, "top_logprobs", 0),
        (response, "truncation", "disabled"),
        *((call, "stream", False) for call in (chat, completion, response)),
    ],
)
def test_a_value_that_asks_for_nothing_is_as_absent(call: Any, name: str, value: object) -> None:
    assert call(**{name: value}) == call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "u"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("service_tier", "flex"),
        ("safety_identifier", "s"),
        ("prompt_cache_key", "k"),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("prompt_cache_retention", "24h"),
    ],
)
@pytest.mark.parametrize("call", [chat, completion, embeddings, response])
def test_a_parameter_that_changes_no_answer_is_taken(call: Any, name: str, value: object) -> None:
    assert getattr(call(**{name: value}), name) == value
    assert call(**{name: None}) == call()


@pytest.mark.parametrize("call", [chat, completion, embeddings, response])
def test_null_is_as_absent(call: Any) -> None:
    assert call(dimensions=None, temperature=None, logprobs=None, anything=None) == call()


@pytest.mark.parametrize("call", [chat, completion, embeddings, response])
def test_an_unknown_parameter_is_named(call: Any) -> None:
    fault = fault_of(call, temperatur=0)
    assert (fault.param, fault.code) == ("temperatur", "unknown_parameter")
    assert fault.message == "Unknown parameter: 'temperatur'."


def test_an_unknown_name_that_is_very_long_is_cut() -> None:
    fault = fault_of(chat, **{"x" * 100_000: 0})
    assert len(fault.message) < 200


@pytest.mark.parametrize("call", [chat, completion, embeddings, response])
def test_an_unknown_parameter_is_dropped_where_a_setting_says_so(call: Any) -> None:
    assert call(rules=LENIENT, temperatur=0) == call()


def test_inside_a_message_too_an_unknown_name_is_dropped_where_a_setting_says_so() -> None:
    assert chat(LENIENT, messages=[{**MESSAGES[0], "weight": 1}]) == chat()
    assert response([{**MESSAGES[0], "weight": 1}], LENIENT) == response([{**MESSAGES[0]}])


@pytest.mark.parametrize("rules", [RULES, LENIENT])
@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (chat, "messages", [{"role": "assistant", "function_call": {"name": "f"}}]),
        # Of another endpoint: to drop it would change the answer that is meant.
        (chat, "max_output_tokens", 5),
        (chat, "suffix", "x"),
        (embeddings, "temperature", 1),
        (response, "max_tokens", 5),
        (response, "stop", "x"),
    ],
)
def test_what_the_reference_knows_is_never_dropped(
    rules: Rules, call: Any, name: str, value: object
) -> None:
    assert fault_of(call, rules=rules, **{name: value}).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("call", "params"),
    [
        (chat, chat_params.CompletionCreateParamsNonStreaming),
        (completion, completion_params.CompletionCreateParamsNonStreaming),
        (embeddings, embedding_params.EmbeddingCreateParams),
        (response, response_params.ResponseCreateParamsNonStreaming),
    ],
)
def test_every_parameter_of_the_official_client_is_known(call: Any, params: Any) -> None:
    assert set(params.__annotations__) <= set(type(call()).model_fields)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ("", "input", "invalid_value"),
        ([], "input", "invalid_value"),
        (5, "input", "invalid_type"),
        ({"role": "user", "content": "x"}, "input", "invalid_type"),
        (["x"], "input.0", "invalid_type"),
        ([{"role": "user"}], "input.0.content", "missing_required_parameter"),
        ([{"content": "x"}], "input.0.role", "missing_required_parameter"),
        ([{"role": "tool", "content": "x"}], "input.0.role", "invalid_value"),
        ([{"role": "user", "content": []}], "input.0.content", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input.0.content.0.type",
            "invalid_value",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "input.0.content.0.type",
            "invalid_value",
        ),
        (
            [*MESSAGES, {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}],
            "input.1.type",
            "invalid_value",
        ),
        ([{"type": "item_reference", "id": "msg_1"}], "input.0.type", "invalid_value"),
    ],
)
def test_a_fault_in_the_input_of_a_response_is_named_by_its_place(
    given: Any, param: str, code: str
) -> None:
    fault = fault_of(response, given)
    assert (fault.param, fault.code) == (param, code)


def test_the_input_of_a_response_is_messages_however_it_was_written() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    for given in ("ab", [{"role": "user", "content": "ab"}], [{"role": "user", "content": parts}]):
        (item,) = response(given).input
        assert (item.role, item.text) == ("user", "ab")


def test_a_message_of_a_response_can_be_sent_again_as_it_came() -> None:
    text = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
    came = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
        "phase": None,
    }
    assert response([*MESSAGES, came]).input[1].text == "x"


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("text", {"verbosity": "high"}, "text.verbosity"),
        ("reasoning", {"effort": "low"}, "reasoning.effort"),
        ("reasoning", {"summary": "auto"}, "reasoning.summary"),
    ],
)
def test_a_part_of_a_parameter_that_is_not_honoured_is_named(
    name: str, value: object, param: str
) -> None:
    fault = fault_of(response, **{name: value})
    assert (fault.param, fault.code) == (param, "unsupported_parameter")


def test_plain_text_without_reasoning_can_be_asked_for() -> None:
    response(text={"format": {"type": "text"}, "verbosity": "medium"})
    response(text={}, reasoning={"effort": "none", "summary": None})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"choice": ["a"], "regex": "a"}, "regex"),
        ({"regex": "a", "grammar": "start: A"}, "grammar"),
        ({"response_format": {"type": "json_object"}, "choice": ["a"]}, "choice"),
        ({"response_format": SCHEMA, "tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "regex": "a"}, "regex"),
    ],
)
def test_an_answer_has_one_form(given: dict[str, Any], param: str) -> None:
    fault = fault_of(chat, **given)
    assert (fault.param, fault.code) == (param, "invalid_value")


def test_no_more_answers_are_told_than_are_made() -> None:
    for n, best_of in ((None, 20), (3, 3), (2, 5), (3, 1), (3, 0)):
        assert completion(n=n, best_of=best_of).best_of == best_of
    fault = fault_of(completion, n=3, best_of=2)
    assert (fault.param, fault.code) == ("best_of", "invalid_value")


def test_what_asks_for_no_form_stands_beside_another() -> None:
    assert chat(response_format={"type": "text"}, choice=["a", "b"]).choice == ["a", "b"]
    assert chat(tools=TOOLS, tool_choice="none", response_format=SCHEMA).tools


def test_log_probabilities_of_an_echoed_prompt_can_be_asked_for() -> None:
    assert completion(echo=True).echo
    assert completion(logprobs=3).logprobs == 3
    assert completion(echo=True, logprobs=0).logprobs == 0


def test_a_conversation_with_calls_can_be_sent_again_as_it_came() -> None:
    body = chat(
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert [message.text for message in body.messages] == ["x", "", "sunny"]
    assert body.messages[1].tool_calls
    assert body.messages[1].tool_calls[0].function.name == "weather"


def test_a_schema_stands_under_its_own_name() -> None:
    asked = chat(response_format=SCHEMA).response_format
    assert asked is not None
    assert asked.schema_of_json == {"enum": ["a"]}
    text = response(text={"format": {"type": "json_schema", "name": "n", "schema": {}}}).text
    assert text is not None
    assert text.format is not None
    assert text.format.schema_of_json == {}
