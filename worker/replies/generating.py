"""What does an answered chat, completions or responses line hold?

The reference's `ChatCompletion`, `Completion` and `Response`.
"""

from collections.abc import Sequence
from typing import Any, assert_never

from engine.request import FinishReason, Generation
from service.bodies.chat import ChatBody
from service.bodies.completions import CompletionBody
from service.bodies.responses import ResponsesBody
from service.ids import new_id
from worker.prompts import Generate
from worker.replies.usage import Reply, Usage


def generated(prompt: Generate, answers: Sequence[Generation], *, created: int) -> Reply:
    """A line's choices in order. A prompt shared by choices counts once."""
    usage = Usage(
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
    return Reply(body, usage)


def _chat_completion(
    asked: ChatBody, answers: Sequence[Generation], usage: Usage, created: int
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
    asked: CompletionBody, answers: Sequence[Generation], usage: Usage, created: int
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
    asked: ResponsesBody, answer: Generation, usage: Usage, created: int
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
