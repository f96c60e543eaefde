"""Does every endpoint's line come back as the reference's object, or refused by its parameter?"""

from typing import Any

import orjson
import pytest
from openai.types import Completion, CreateEmbeddingResponse, ModerationCreateResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from service.batch import BatchStatus
from service.settings import UnknownParameters
from tests import invariants
from tests.pipeline import Pipeline
from tests.typed import exactly

SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletion,
        {"model": "stub-chat", "messages": [{"role": "user", "content": "hello"}]},
    ),
    "/v1/completions": (Completion, {"model": "stub-chat", "prompt": "hello"}),
    "/v1/responses": (Response, {"model": "stub-chat", "input": "hello"}),
    "/v1/embeddings": (CreateEmbeddingResponse, {"model": "stub-embed", "input": "hello"}),
    "/v1/moderations": (ModerationCreateResponse, {"model": "stub-classify", "input": "hello"}),
}


def run(pipeline: Pipeline, endpoint: str, *bodies: dict[str, Any]) -> Any:
    """A batch of these bodies under custom_ids "0", "1" …, run to its end."""
    lines = [
        orjson.dumps(
            {"custom_id": str(n), "method": "POST", "url": endpoint, "body": body},
        )
        for n, body in enumerate(bodies)
    ]
    batch_id = pipeline.submit(lines, endpoint=endpoint)
    pipeline.run("stub-embed", "stub-chat", "stub-classify")
    assert pipeline.batch(batch_id).status == BatchStatus.COMPLETED
    invariants.check(pipeline, batch_id)
    return batch_id


def answers(pipeline: Pipeline, endpoint: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of the answers to these."""
    return [line["response"]["body"] for line in pipeline.output(run(pipeline, endpoint, *bodies))]


@pytest.mark.parametrize("endpoint", SHAPES)
def test_an_answer_is_just_what_the_official_clients_type_says(
    pipeline: Pipeline, endpoint: str
) -> None:
    shape, body = SHAPES[endpoint]
    given = {**body, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "flex"}
    for answer in answers(pipeline, endpoint, body, given):
        assert exactly(shape, answer).model == body["model"]


def test_a_response_says_what_a_chat_of_the_same_messages_says(pipeline: Pipeline) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "bye"},
    ]
    parts = {"type": "input_text", "text": "bye"}
    said = {"type": "output_text", "text": "hi", "annotations": []}
    (chat,) = answers(
        pipeline,
        "/v1/chat/completions",
        {"model": "stub-chat", "messages": turns, "max_tokens": 100, "temperature": 0},
    )
    common = {"model": "stub-chat", "max_output_tokens": 100, "temperature": 0}
    found = answers(
        pipeline,
        "/v1/responses",
        {**common, "input": turns},
        {**common, "instructions": "Be brief.", "input": turns[1:]},
        {
            **common,
            "instructions": "Be brief.",
            "input": [
                turns[1],
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [said],
                },
                {"type": "message", "role": "user", "content": [parts]},
            ],
        },
    )
    for answer in found:
        typed = exactly(Response, answer)
        assert typed.output_text == chat["choices"][0]["message"]["content"]
        assert typed.usage is not None
        assert typed.usage.input_tokens == chat["usage"]["prompt_tokens"]
        assert typed.status == "completed"


def test_a_response_that_reaches_its_limit_is_incomplete_and_in_the_output_file(
    pipeline: Pipeline,
) -> None:
    (answer,) = answers(
        pipeline,
        "/v1/responses",
        {"model": "stub-chat", "input": "a text that is too long", "max_output_tokens": 2},
    )
    typed = exactly(Response, answer)
    assert typed.status == "incomplete"
    assert typed.incomplete_details is not None
    assert typed.incomplete_details.reason == "max_output_tokens"
    assert typed.usage is not None
    assert typed.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("endpoint", "limit", "given"),
    [
        ("/v1/chat/completions", "max_tokens", {}),
        ("/v1/chat/completions", "max_completion_tokens", {}),
        ("/v1/completions", "max_tokens", {}),
        ("/v1/responses", "max_output_tokens", {}),
    ],
)
def test_a_limit_over_the_context_is_named_as_the_client_named_it(
    pipeline: Pipeline, endpoint: str, limit: str, given: dict[str, Any]
) -> None:
    _, body = SHAPES[endpoint]
    (line,) = pipeline.errors(run(pipeline, endpoint, {**body, limit: 10**9}))
    error = line["response"]["body"]["error"]
    assert (error["param"], error["code"]) == (limit, "context_length_exceeded")


@pytest.mark.parametrize(
    ("endpoint", "subject", "text"),
    [
        (
            "/v1/chat/completions",
            "messages",
            [{"role": "user", "content": "x" * 40_000}],
        ),
        ("/v1/completions", "prompt", "x" * 40_000),
        ("/v1/responses", "input", "x" * 40_000),
        ("/v1/embeddings", "input", "x" * 40_000),
        ("/v1/moderations", "input", "x" * 100),
    ],
)
def test_a_text_over_the_context_is_named_as_the_client_named_it(
    pipeline: Pipeline, endpoint: str, subject: str, text: object
) -> None:
    _, body = SHAPES[endpoint]
    (line,) = pipeline.errors(run(pipeline, endpoint, {**body, subject: text}))
    error = line["response"]["body"]["error"]
    assert (error["param"], error["code"]) == (subject, "context_length_exceeded")


def test_an_unknown_parameter_fails_its_line_unless_a_setting_drops_it(pipeline: Pipeline) -> None:
    shape, body = SHAPES["/v1/responses"]
    odd = {**body, "temperatur": 0}
    (line,) = pipeline.errors(run(pipeline, "/v1/responses", odd))
    error = line["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("temperatur", "unknown_parameter")
    lenient = pipeline.having(unknown_parameters=UnknownParameters.IGNORE)
    (answer,) = answers(lenient, "/v1/responses", odd)
    exactly(shape, answer)
