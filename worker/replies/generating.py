"""What does an answered chat, completions or responses line hold?

The reference's `ChatCompletion`, `Completion` and `Response`.
"""

from collections.abc import Sequence
from typing import Any, assert_never

from engine.calls import Call
from engine.request import FinishReason, Generation, TokenLogprob
from service.bodies.chat import ChatBody
from service.bodies.completions import CompletionBody
from service.bodies.responses import ResponsesBody
from service.ids import new_id
from worker.labelling import Scored, scored
from worker.prompts import Generate
from worker.replies.logprobs import Echo, of_chat, of_completion
from worker.replies.usage import Reply, Usage


def generated(prompt: Generate, results: Sequence[Generation], *, created: int) -> Reply:
    """A line's choices in order. A prompt shared by choices counts once."""
    scores = _scored(prompt, results)
    answers = results if scores is None else [each for one in scores for each in one.answers]
    usage = Usage(
        taken=sum(answer.input_tokens for answer in answers[:: prompt.choices]),
        cached=sum(answer.cached_tokens for answer in answers[:: prompt.choices]),
        made=sum(answer.output_tokens for answer in answers),
    )
    match prompt.body:
        case ChatBody():
            body = _chat_completion(prompt, prompt.body, answers, usage, created)
        case CompletionBody():
            body = _completion(prompt, prompt.body, answers, usage, created)
        case ResponsesBody():
            body = _response(prompt.body, answers[0], usage, created)
        case unreachable:
            assert_never(unreachable)
    if scores is not None:
        body["halfrate"] = {"labels": [_told(index, each) for index, each in enumerate(scores)]}
    return Reply(body, usage)


def _scored(prompt: Generate, results: Sequence[Generation]) -> list[Scored] | None:
    """Of each prompt, where labels were scored."""
    if prompt.labels is None:
        return None
    each = prompt.requests_each
    return [
        scored(
            prompt.labels,
            results[position * each : (position + 1) * each],
            prompt.sampling,
            taken=len(sequence),
            choices=prompt.choices,
        )
        for position, sequence in enumerate(prompt.sequences)
    ]


def _told(index: int, scores: Scored) -> dict[str, Any]:
    return {
        "index": index,
        "probabilities": scores.probabilities,
        "logprobs": dict(scores.logprobs),
    }


def _chat_completion(
    prompt: Generate, asked: ChatBody, answers: Sequence[Generation], usage: Usage, created: int
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{new_id().hex}",
        "object": "chat.completion",
        "created": created,
        "model": asked.model,
        "choices": [
            {"index": index, **_chat_choice(prompt, answer)} for index, answer in enumerate(answers)
        ],
        "usage": usage.of_completion(),
    }


def _chat_choice(prompt: Generate, answer: Generation) -> dict[str, Any]:
    text, calls = answer.text, list[Call]()
    form = prompt.tokenizer.calls
    offered = prompt.form is not None and prompt.form.param == "tools"
    if form and offered and (form.token is None or form.token in answer.token_ids):
        text, calls = form.read(answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["content"] = text.strip() or None
        message["tool_calls"] = [_tool_call(call) for call in calls]
    called = calls and answer.finish_reason is FinishReason.STOP
    return {
        "message": message,
        "logprobs": of_chat(answer, prompt.tokenizer),
        "finish_reason": "tool_calls" if called else answer.finish_reason,
    }


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        # Some templates take no id again but one of the model's own kind.
        "id": call.id or f"call_{new_id().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _completion(
    prompt: Generate,
    asked: CompletionBody,
    answers: Sequence[Generation],
    usage: Usage,
    created: int,
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for position in range(len(prompt.sequences)):
        begin = position * prompt.choices
        echoed = Echo("", (), special=False)
        if asked.echo:
            echoed = _echoed(prompt, asked, position, answers[begin])
        for answer in _likeliest(answers[begin : begin + prompt.choices], prompt.told):
            logprobs = None
            if asked.logprobs is not None:
                logprobs = of_completion(answer, prompt.tokenizer, echoed)
            choices.append(
                {
                    "index": len(choices),
                    "text": echoed.text + answer.text,
                    "logprobs": logprobs,
                    "finish_reason": answer.finish_reason,
                }
            )
    return {
        "id": f"cmpl-{new_id().hex}",
        "object": "text_completion",
        "created": created,
        "model": asked.model,
        "choices": choices,
        "usage": usage.of_completion(),
    }


def _likeliest(answers: Sequence[Generation], count: int | None) -> Sequence[Generation]:
    """Those whose tokens had the highest log probability on average; all of them as they came."""
    if count in (None, len(answers)):
        return answers
    return sorted(answers, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(answer: Generation) -> float:
    told = answer.logprobs or ()
    return sum(each.logprob for each in told) / max(1, len(told))


def _echoed(prompt: Generate, asked: CompletionBody, position: int, first: Generation) -> Echo:
    """A prompt as text: as it was given, or what its tokens say. The first answer tells of it."""
    given, tokens = asked.prompt[position], prompt.sequences[position]
    told: tuple[int | TokenLogprob, ...] = ()
    if first.prompt_logprobs is not None:
        told = (tokens[0], *first.prompt_logprobs)
    if isinstance(given, str):
        return Echo(given, told, special=False)
    return Echo(prompt.tokenizer.decode(given, skip_special_tokens=False), told, special=True)


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
        "text": {"format": _format(asked), "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": usage.of_response(),
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def _format(asked: ResponsesBody) -> dict[str, Any]:
    if asked.text is None or asked.text.format is None:
        return {"type": "text"}
    return asked.text.format.model_dump(by_alias=True, exclude_none=True)


def _message(answer: Generation, status: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{new_id().hex}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text],
    }
