"""What does an answered line look like in the output or error file?

The bodies are the reference's objects (`CreateEmbeddingResponse`, `ChatCompletion`, `Completion`,
`Response`), so the official client's types read them.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import orjson

from engine.request import Embedding, FinishReason, Generation, Work
from service.batch import LineState
from service.bodies.chat import ChatBody
from service.bodies.completions import CompletionBody
from service.bodies.responses import ResponsesBody
from service.faults import Fault
from service.ids import Prefix, new_id, show
from worker.prompts import Embed, Generate

# Legal inside JSON, but many readers split lines on them.
_SEPARATORS = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)

NEVER_RAN: Mapping[LineState, tuple[str, str]] = {
    LineState.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    LineState.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
}


@dataclass(frozen=True, slots=True)
class Answered:
    """A line's final answer: a success, or the refusal of the call."""

    line: int
    custom_id: str
    status_code: int
    body: Mapping[str, Any]
    error_code: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    work: Work = Work()

    @property
    def succeeded(self) -> bool:
        """Whether it stands in the output file."""
        return self.status_code < 400


def refused(line: int, custom_id: str, fault: Fault, *, status_code: int = 400) -> Answered:
    """The call did not work; the body says why."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    return Answered(line, custom_id, status_code, {"error": error}, error_code=fault.code)


def embedded(line: int, custom_id: str, prompt: Embed, vectors: Sequence[Embedding]) -> Answered:
    """An embeddings line, one vector an input, in input order."""
    as_text = prompt.body.encoding_format == "base64"
    tokens = sum(vector.input_tokens for vector in vectors)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_text else vector.vector,
        }
        for index, vector in enumerate(vectors)
    ]
    body = {
        "object": "list",
        "data": data,
        "model": prompt.body.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Answered(line, custom_id, 200, body, input_tokens=tokens)


def _base64(vector: Embedding) -> str:
    return base64.b64encode(vector.vector.astype("<f4").tobytes()).decode("ascii")


def generated(
    line: int, custom_id: str, prompt: Generate, answers: Sequence[Generation], *, created: int
) -> Answered:
    """A line's choices in order. A prompt shared by choices counts once."""
    usage = _Usage(
        taken=sum(answer.input_tokens for answer in answers[:: prompt.choices]),
        cached=sum(answer.cached_tokens for answer in answers[:: prompt.choices]),
        made=sum(answer.output_tokens for answer in answers),
    )
    match prompt.body:
        case ChatBody():
            body = _chat_completion(prompt.body, answers, usage, created)
        case CompletionBody():
            body = _completion(prompt.body, answers, usage, created)
        case ResponsesBody():
            body = _response(prompt.body, answers[0], usage, created)
        case unreachable:
            assert_never(unreachable)
    return Answered(
        line,
        custom_id,
        200,
        body,
        input_tokens=usage.taken,
        cached_tokens=usage.cached,
        output_tokens=usage.made,
    )


@dataclass(frozen=True, slots=True)
class _Usage:
    taken: int
    cached: int
    made: int

    def of_completion(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.taken,
            "completion_tokens": self.made,
            "total_tokens": self.taken + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def of_response(self) -> dict[str, Any]:
        return {
            "input_tokens": self.taken,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.taken + self.made,
        }


def _chat_completion(
    asked: ChatBody, answers: Sequence[Generation], usage: _Usage, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "id": f"chatcmpl-{new_id().hex}",
        "object": "chat.completion",
        "created": created,
        "model": asked.model,
        "choices": choices,
        "usage": usage.of_completion(),
    }


def _completion(
    asked: CompletionBody, answers: Sequence[Generation], usage: _Usage, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "id": f"cmpl-{new_id().hex}",
        "object": "text_completion",
        "created": created,
        "model": asked.model,
        "choices": choices,
        "usage": usage.of_completion(),
    }


def _response(
    asked: ResponsesBody, answer: Generation, usage: _Usage, created: int
) -> dict[str, Any]:
    """What was asked stands in it too, as in the reference's, and the values that were taken."""
    cut = answer.finish_reason is FinishReason.LENGTH
    status = "incomplete" if cut else "completed"
    return {
        "id": f"resp_{new_id().hex}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "completed_at": None if cut else created,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": asked.model,
        "output": [_message(answer, status)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": usage.of_response(),
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def _message(answer: Generation, status: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{new_id().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text],
    }


def response_line(answer: Answered) -> bytes:
    """The line of the output or error file, without its line end."""
    return _json(
        {
            "id": show(Prefix.LINE, new_id()),
            "custom_id": answer.custom_id,
            "response": {
                "status_code": answer.status_code,
                "request_id": show(Prefix.REQUEST, new_id()),
                "body": answer.body,
            },
            "error": None,
        }
    )


def never_ran_line(custom_id: str, state: LineState) -> bytes:
    """The error file's line for a request that expired or was cancelled."""
    code, message = NEVER_RAN[state]
    return _json(
        {
            "id": show(Prefix.LINE, new_id()),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


def _json(value: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    for raw, escaped in _SEPARATORS:
        data = data.replace(raw, escaped)
    return data


def _plain(value: object) -> object:
    # orjson takes contiguous arrays only.
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError
