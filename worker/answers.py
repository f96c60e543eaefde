"""What does an answered line look like in the output or error file?

The bodies stand in `worker.replies`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import numpy as np
import orjson

from engine.request import (
    Classification,
    Embedding,
    Encoded,
    Generation,
    TokenClassification,
)
from service.batch import LineState
from service.db.lines import Effort
from service.faults import Fault
from service.ids import Prefix, new_id, show
from worker.figures import effort_of
from worker.prompts import Generate, Prompt
from worker.readings import Classify, Compare, Embed, Moderate, Pairs, Tag, ZeroShot
from worker.replies.classify import classification, zero_shot
from worker.replies.embeddings import embeddings
from worker.replies.generating import generated
from worker.replies.moderations import moderations
from worker.replies.score import compared, scored
from worker.replies.spans import tagged
from worker.replies.usage import Reply

Kind = TypeVar("Kind")

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
    effort: Effort = Effort()

    @property
    def succeeded(self) -> bool:
        """Whether it stands in the output file."""
        return self.status_code < 400


def refused(line: int, custom_id: str, fault: Fault, *, status_code: int = 400) -> Answered:
    """The call did not work; the body says why."""
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    return Answered(line, custom_id, status_code, {"error": error}, error_code=fault.code)


def answered(
    line: int,
    custom_id: str,
    prompt: Prompt,
    results: Sequence[Encoded | Generation],
    *,
    labels: Sequence[str],
    created: int,
) -> Answered:
    """A line whose requests all have their results, in the order of the requests.

    `labels` are the model's. Raises TypeError for results of another kind of model.
    """
    reply = _reply(prompt, results, labels, created)
    return Answered(
        line,
        custom_id,
        200,
        reply.body,
        input_tokens=reply.usage.taken,
        cached_tokens=reply.usage.cached,
        output_tokens=reply.usage.made,
        effort=effort_of(results),
    )


def _reply(
    prompt: Prompt, results: Sequence[Encoded | Generation], labels: Sequence[str], created: int
) -> Reply:
    match prompt:
        case Generate():
            return generated(prompt, _all(Generation, results), created=created)
        case Embed():
            return embeddings(prompt, _all(Embedding, results))
        case Classify():
            return classification(prompt, _all(Classification, results), labels, created=created)
        case ZeroShot():
            return zero_shot(prompt, _all(Embedding, results), created=created)
        case Tag():
            return tagged(prompt, _all(TokenClassification, results), labels, created=created)
        case Pairs():
            return scored(prompt, _all(Classification, results), created=created)
        case Compare():
            return compared(prompt, _all(Embedding, results), created=created)
        case Moderate():
            return moderations(prompt, _all(Classification, results), labels)
        case unreachable:
            assert_never(unreachable)


def _all(kind: type[Kind], results: Sequence[object]) -> list[Kind]:
    found = [result for result in results if isinstance(result, kind)]
    if len(found) < len(results):
        msg = f"the engine answered with something that is no {kind.__name__}"
        raise TypeError(msg)
    return found


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
