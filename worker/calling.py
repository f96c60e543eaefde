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
    if isinstance(body.tool_choice, NamedTool):
        chosen = body.tool_choice.function.name
        tools, several = [tool for tool in tools if tool.function.name == chosen], False
    calls = f"rest more* {_quoted(form.closing)}" if several else f"rest {_quoted(form.closing)}"
    token = "" if form.token is None else f"<[{form.token}]>"
    rules = [
        f"calls: {token} {_quoted(form.head)} {calls}",
        f"rest: {' | '.join(f'rest_{n}' for n in range(len(tools)))}",
        *(_rest(n, tool, form) for n, tool in enumerate(tools)),
    ]
    if several:
        rules.append(f"more: {_quoted((form.between or '') + form.begin)} rest")
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        rules.append("start: calls")
    elif token:
        # A text holds no special token, so that one begins the calls wherever it stands.
        rules += ["start: TEXT | TEXT calls", r"TEXT: /(.|\n)*/"]
    elif form.sign:
        # From the sign on it is a call: what follows it is held to the form.
        behind = form.head[form.head.index(form.sign) + len(form.sign) :]
        rules += [
            f"start: TEXT | sign {_quoted(behind)} {calls}",
            f"sign[lazy]: TEXT {_quoted(form.sign)}",
            r"TEXT: /(.|\n)*/",
        ]
    else:
        rules += ["start: OTHER | calls", rf"OTHER: /([^\{form.head.lstrip()[0]}](.|\n)*)?/"]
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _rest(number: int, tool: Tool, form: CallForm) -> str:
    function = tool.function
    schema = function.parameters or {"type": "object", "properties": {}}
    spaced = {"type": "object", **schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}}
    own = "" if form.id_end is None else f"/[A-Za-z0-9]{{9}}/ {_quoted(form.id_end)}"
    return (
        f"rest_{number}: {_quoted(function.name + form.middle)}"
        f" %json {json.dumps(spaced, ensure_ascii=False)} {_quoted(form.end)} {own}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
