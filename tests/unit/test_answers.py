"""Do response lines hold the reference's objects, whatever the engine said?"""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from engine.request import Embedding, FinishReason, Generation, Sampling, TokenLogprob
from engine.stub import StubTokenizer
from service.batch import LineState
from service.bodies import check
from service.bodies.check import Rules
from service.catalog import Model, ModelKind
from service.faults import Fault
from service.ids import Prefix
from tests.typed import exactly
from worker import prompts
from worker.answers import (
    NEVER_RAN,
    Answered,
    answered,
    never_ran_line,
    refused,
    response_line,
)
from worker.prompts import Generate, Prompt
from worker.readings import Embed, Reading

RULES = Rules(max_inputs=9)


def embed(**given_too: Any) -> Embed:
    body = check.embeddings({"model": "m", "input": ["a", "b"], **given_too}, RULES)
    return Embed(body, (Reading((1, 2)), Reading((3, 4, 5))))


def vectors(*rows: list[float]) -> list[Embedding]:
    return [
        Embedding(n, np.array(row, dtype=np.float32), input_tokens=n + 2)
        for n, row in enumerate(rows)
    ]


def chat(choices: int = 1) -> Generate:
    messages = [{"role": "user", "content": "x"}]
    body = check.chat({"model": "m", "messages": messages, "n": choices}, RULES)
    return Generate(body, ((1,),), Sampling(max_tokens=4), choices, StubTokenizer())


def completion(prompts: int = 1, choices: int = 1) -> Generate:
    body = check.completion({"model": "m", "prompt": ["x"] * prompts, "n": choices}, RULES)
    return Generate(body, ((1,),) * prompts, Sampling(max_tokens=4), choices, StubTokenizer())


def response(**given_too: Any) -> Generate:
    body = check.response({"model": "m", "input": "x", **given_too}, RULES)
    return Generate(body, ((1,),), Sampling(max_tokens=4), 1, StubTokenizer())


def best(told: int, made: int, **given: Any) -> Generate:
    prompt = prompts.read(
        {"model": "m", "prompt": ["x", "y"], "n": told, "best_of": made, **given},
        endpoint="/v1/completions",
        model=Model(id="m", kind=ModelKind.GENERATE, source="stub:", price_input="1"),
        tokenizer=StubTokenizer(),
        rules=RULES,
    )
    assert isinstance(prompt, Generate)
    return prompt


@pytest.mark.parametrize("asked", [None, 1])
def test_of_several_answers_the_likeliest_are_told_and_all_are_counted(asked: int | None) -> None:
    prompt = best(2, 3, logprobs=asked)
    assert prompt.sampling.logprobs == (asked or 0)
    requests = prompts.requests(prompt, key="k")
    assert [request.choice for request in requests] == [0, 1, 2, 0, 1, 2]  # type: ignore[union-attr]
    # Of the second prompt the shorter answer has the higher sum, and the longer the higher mean.
    means = [[-3.0], [-1.0], [-2.0], [-1.5], [-1.0, -1.0], [-9.0]]
    answers = [
        replace(
            said(f"answer {n}", len(each)),
            logprobs=tuple(TokenLogprob(65, logprob) for logprob in each),
        )
        for n, each in enumerate(means)
    ]
    line = orjson.loads(response_line(answer_to(prompt, answers)))
    body = line["response"]["body"]
    exactly(Completion, body)
    texts = ["answer 1", "answer 2", "answer 4", "answer 3"]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all((choice["logprobs"] is None) is (asked is None) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 7
    assert body["usage"]["prompt_tokens"] == 14


def said(text: str, tokens: int = 3, reason: FinishReason = FinishReason.STOP) -> Generation:
    return Generation("id", text, (1,) * tokens, reason, 7, 2, tokens)


def answer_to(
    prompt: Prompt, results: Sequence[Embedding | Generation], created: int = 5, name: str = "c"
) -> Answered:
    return answered(1, name, prompt, results, labels=(), created=created)


def body_of(line: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = orjson.loads(line)
    assert set(parsed) == {"id", "custom_id", "response", "error"}
    assert parsed["id"].startswith(Prefix.LINE)
    assert parsed["error"] is None
    assert set(parsed["response"]) == {"status_code", "request_id", "body"}
    assert parsed["response"]["request_id"].startswith(Prefix.REQUEST)
    body: dict[str, Any] = parsed["response"]["body"]
    return body


def test_embeddings_are_the_references_object_in_input_order() -> None:
    answer = answer_to(embed(), vectors([0.5, -1.0], [0.25, 1e-7]))
    typed = exactly(CreateEmbeddingResponse, body_of(response_line(answer)))
    assert [each.index for each in typed.data] == [0, 1]
    assert [each.object for each in typed.data] == ["embedding", "embedding"]
    assert typed.data[0].embedding == [0.5, -1.0]
    assert (typed.usage.prompt_tokens, typed.usage.total_tokens) == (5, 5)
    assert (typed.object, typed.model) == ("list", "m")
    assert (answer.input_tokens, answer.output_tokens, answer.succeeded) == (5, 0, True)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_base64_and_float_are_the_same_bytes(row: list[float]) -> None:
    as_float = body_of(response_line(answer_to(embed(), vectors(row, row))))
    text = embed(encoding_format="base64")
    as_text = body_of(response_line(answer_to(text, vectors(row, row))))
    floats = np.array(as_float["data"][0]["embedding"], dtype="<f4").tobytes()
    assert base64.b64decode(as_text["data"][0]["embedding"]) == floats
    assert floats == np.array(row, dtype="<f4").tobytes()


def test_a_vector_that_is_a_view_is_written_too() -> None:
    view = np.arange(8, dtype=np.float32)[::2]
    assert not view.flags["C_CONTIGUOUS"]
    for wanted in ("float", "base64"):
        prompt = embed(encoding_format=wanted)
        line = response_line(answer_to(prompt, [Embedding(0, view, 1)]))
        found = body_of(line)["data"][0]["embedding"]
        if wanted == "base64":
            found = np.frombuffer(base64.b64decode(found), dtype="<f4").tolist()
        assert found == [0, 2, 4, 6]


def test_a_chat_answer_is_the_references_object() -> None:
    answers = [said("one", 3), said("two", 4, FinishReason.LENGTH)]
    answer = answer_to(chat(2), answers, created=1_700_000_000)
    typed = exactly(ChatCompletion, body_of(response_line(answer)))
    assert typed.object == "chat.completion"
    assert typed.created == 1_700_000_000
    assert [choice.index for choice in typed.choices] == [0, 1]
    assert [choice.message.content for choice in typed.choices] == ["one", "two"]
    assert [choice.finish_reason for choice in typed.choices] == ["stop", "length"]
    assert typed.choices[0].message.role == "assistant"
    assert typed.usage is not None
    # The prompt is counted once, whatever the number of choices.
    assert (typed.usage.prompt_tokens, typed.usage.completion_tokens) == (7, 7)
    assert typed.usage.total_tokens == 14
    assert (answer.input_tokens, answer.cached_tokens, answer.output_tokens) == (7, 2, 7)


def test_a_completion_is_the_references_object_with_choices_of_all_prompts() -> None:
    answers = [said(text) for text in ("a0", "a1", "b0", "b1")]
    answer = answer_to(completion(prompts=2, choices=2), answers)
    typed = exactly(Completion, body_of(response_line(answer)))
    assert typed.object == "text_completion"
    assert [(each.index, each.text) for each in typed.choices] == [
        *((0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"))
    ]
    assert typed.usage is not None
    assert (typed.usage.prompt_tokens, typed.usage.completion_tokens) == (14, 12)
    assert answer.cached_tokens == 4


def test_a_response_is_the_references_object() -> None:
    prompt = response(
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0,
        top_p=0.5,
        max_output_tokens=9,
        user="u",
    )
    answer = answer_to(prompt, [said("one", 3)], created=1_700_000_000)
    typed = exactly(Response, body_of(response_line(answer)))
    assert typed.output_text == "one"
    assert (typed.object, typed.status, typed.error) == ("response", "completed", None)
    assert (typed.created_at, typed.completed_at) == (1_700_000_000, 1_700_000_000)
    assert (typed.instructions, typed.metadata, typed.user) == ("Be brief.", {"a": "b"}, "u")
    assert (typed.temperature, typed.top_p, typed.max_output_tokens) == (0, 0.5, 9)
    assert typed.id.startswith("resp_")
    assert typed.usage is not None
    assert (typed.usage.input_tokens, typed.usage.output_tokens) == (7, 3)
    assert (typed.usage.input_tokens_details.cached_tokens, typed.usage.total_tokens) == (2, 10)
    assert (answer.input_tokens, answer.cached_tokens, answer.output_tokens) == (7, 2, 3)


def test_a_response_that_was_cut_is_incomplete_and_says_why() -> None:
    cut = said("one two", 4, FinishReason.LENGTH)
    answer = answer_to(response(), [cut])
    typed = exactly(Response, body_of(response_line(answer)))
    assert (typed.status, typed.completed_at, typed.output_text) == ("incomplete", None, "one two")
    assert typed.incomplete_details is not None
    assert typed.incomplete_details.reason == "max_output_tokens"
    assert typed.output[0].type == "message"
    assert typed.output[0].status == "incomplete"
    assert answer.succeeded


def test_a_refusal_holds_the_references_error() -> None:
    for status, kind in ((400, "invalid_request_error"), (500, "server_error")):
        fault = Fault("Nope.", "input", "invalid_value")
        answer = refused(3, "c", fault, status_code=status)
        line = orjson.loads(response_line(answer))
        assert line["response"]["status_code"] == status
        assert line["response"]["body"] == {
            "error": {"message": "Nope.", "type": kind, "param": "input", "code": "invalid_value"}
        }
        assert (answer.succeeded, answer.error_code) == (False, "invalid_value")


@pytest.mark.parametrize("state", list(NEVER_RAN))
def test_a_line_that_never_ran_has_no_response(state: LineState) -> None:
    line = orjson.loads(never_ran_line("c", state))
    assert line["response"] is None
    assert line["custom_id"] == "c"
    assert set(line["error"]) == {"code", "message"}
    assert line["error"]["code"] == f"batch_{state}"


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_any_text_and_custom_id_come_back_from_one_line_of_utf8(text: str, custom_id: str) -> None:
    text, custom_id = "\u2028" + text, custom_id + "\u0085"
    answer = answer_to(chat(), [said(text)], name=custom_id)
    line = response_line(answer)
    # What no reader splits, by any of the rules there are.
    assert line.decode().splitlines() == [line.decode()]
    found = json.loads(line)
    assert found["custom_id"] == custom_id
    assert found["response"]["body"]["choices"][0]["message"]["content"] == text
    assert orjson.loads(never_ran_line(custom_id, LineState.EXPIRED))["custom_id"] == custom_id


def test_ids_of_lines_are_unique() -> None:
    lines = [orjson.loads(never_ran_line("c", LineState.EXPIRED)) for _ in range(1_000)]
    assert len({line["id"] for line in lines}) == 1_000
