"""How is a model offered tools, and held to calling them rightly?"""

import json
from collections.abc import Sequence
from typing import Any

from engine.calls import CallForm
from engine.request import JSON_SPACE, Grammar, GrammarKind
from engine.surface import TokenizerLike
from service.bodies.chat import ChatBody, Message
from service.bodies.check import InvalidBody
from service.bodies.tools import NamedTool, Tool
from service.faults import Fault


def offered(body: ChatBody, tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    """What the chat template is told of tools. Raises InvalidBody where it has no place for them.

    `tool_choice: none` offers nothing, so that nothing can be called.
    """
    tools = [] if body.tool_choice == "none" else body.tools or []
    param = "tools" if tools else _first_call(body)
    if param is not None and tokenizer.calls is None:
        message = (
            f"Unsupported parameter: '{param}' is of tools, for which the chat template of this "
            "model has no place, or writes their calls in a way that is not read."
        )
        raise InvalidBody(Fault(message, param, "unsupported_parameter"))
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _first_call(body: ChatBody) -> str | None:
    """Where the conversation so far first calls a tool, or has its answer."""
    for place, message in enumerate(body.messages):
        if message.tool_calls:
            return f"messages.{place}.tool_calls"
        if message.role == "tool":
            return f"messages.{place}.role"
    return None


def told(message: Message) -> dict[str, Any]:
    """What the chat template is told of a turn, beside its role and text."""
    more: dict[str, Any] = {} if message.name is None else {"name": message.name}
    if message.tool_call_id is not None:
        more["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        # Templates write the arguments themselves.
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return more


def grammar(body: ChatBody, tools: Sequence[Tool], form: CallForm) -> Grammar:
    """What an answer may be: a text, or calls, or either, as `tool_choice` says."""
    several = body.parallel_tool_calls is not False and form.between is not None
    match body.tool_choice:
        case NamedTool(function=chosen):
            tools = [tool for tool in tools if tool.function.name == chosen.name]
            start = "call"
        case "required":
            start = "call more*" if several else "call"
        case _ if form.sign:
            start = "TEXT | noticed more*" if several else "TEXT | noticed"
        case _:
            start = "OTHER | call more*" if several else "OTHER | call"
    rules = [
        f"start: {start}",
        f"call: {_quoted(form.begin)} rest",
        f"rest: {' | '.join(f'rest_{n}' for n in range(len(tools)))}",
        *(_rest(n, tool, form) for n, tool in enumerate(tools)),
    ]
    if several:
        rules.append(f"more: {_quoted(form.between or '')} call")
    if "noticed" in start:
        # From the sign on it is a call: what follows it is held to the form.
        behind = form.begin[form.begin.index(form.sign) + len(form.sign) :]
        rules += [
            f"sign[lazy]: TEXT {_quoted(form.sign)}",
            f"noticed: sign {_quoted(behind)} rest",
            r"TEXT: /(.|\n)*/",
        ]
    if "OTHER" in start:
        rules.append(r"OTHER: /([^{](.|\n)*)?/")
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _rest(number: int, tool: Tool, form: CallForm) -> str:
    function = tool.function
    schema = function.parameters or {"type": "object", "properties": {}}
    spaced = {"type": "object", **schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return (
        f"rest_{number}: {_quoted(function.name + form.middle)}"
        f" %json {json.dumps(spaced, ensure_ascii=False)} {_quoted(form.end)}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
