"""What does an answered line look like in the output or error file?

The bodies are the reference's objects (`CreateEmbeddingResponse`, `ChatCompletion`, `Completion`),
so the official client's types read them.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from engine.request import Embedding, Generation
from service import bodies
from service.batch import LineState
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
    """A chat or completions line, its choices in order. A prompt shared by choices counts once."""
    taken = sum(answer.input_tokens for answer in answers[:: prompt.choices])
    cached = sum(answer.cached_tokens for answer in answers[:: prompt.choices])
    made = sum(answer.output_tokens for answer in answers)
    is_chat = isinstance(prompt.body, bodies.ChatBody)
    body = {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + new_id().hex,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": prompt.body.model,
        "choices": [
            (_chat_choice if is_chat else _text_choice)(index, answer)
            for index, answer in enumerate(answers)
        ],
        "usage": {
            "prompt_tokens": taken,
            "completion_tokens": made,
            "total_tokens": taken + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    return Answered(
        line,
        custom_id,
        200,
        body,
        input_tokens=taken,
        cached_tokens=cached,
        output_tokens=made,
    )


def _chat_choice(index: int, answer: Generation) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }


def _text_choice(index: int, answer: Generation) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
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
