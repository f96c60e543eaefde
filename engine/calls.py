"""How does a model write that it calls a function? As its chat template writes such calls.

The template is shown a conversation with calls of made-up names, and what it makes of them is read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_NAME, _OTHER, _KEY = "probed_function", "other_function", "probed_key"
_IDS = ("probed001", "probed002")
_USER = {"role": "user", "content": "probe"}

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Call:
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is `begin` name `middle` arguments `end`; `between` calls of one turn, None where a
    turn has one call at most."""

    begin: str
    middle: str
    end: str
    between: str | None

    @property
    def sign(self) -> str:
        """The first word of a call, by which a text is known to call; "" where it is plain JSON."""
        return self.begin.split("{")[0].split("\n")[0].strip()

    def read(self, text: str) -> tuple[str, list[Call]]:
        """What stands before the calls, and the calls that are whole."""
        start = text.find(self.begin)
        if start < 0 or (not self.sign and text[:start].strip()):
            return text, []
        calls, place = [], start
        while text.startswith(self.begin, place):
            found = self._call(text, place)
            if found is None:
                break
            call, place = found
            calls.append(call)
            if self.between is None or not text.startswith(self.between, place):
                break
            place += len(self.between)
        return (text[:start], calls) if calls else (text, [])

    def _call(self, text: str, place: int) -> tuple[Call, int] | None:
        """The call that begins there, and where it ends."""
        named = place + len(self.begin)
        middle = text.find(self.middle, named)
        if middle < 0:
            return None
        start = middle + len(self.middle)
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return None
        if not isinstance(arguments, dict) or not text.startswith(self.end, end):
            return None
        return Call(text[named:middle], text[start:end]), end + len(self.end)


def call_form(render: Render, special: Sequence[str]) -> CallForm | None:
    """How the template writes calls; None where it writes none, or in a way that is not known.

    `render(messages, tools, begins)` writes messages, up to where an answer begins where `begins`.
    """
    tools = [_tool(_NAME), _tool(_OTHER)]
    if _NAME not in _tried(render, [_USER], tools, begins=True):
        return None
    before = _tried(render, [_USER], tools, begins=True)
    single = _after(before, _tried(render, _called(_NAME), tools, begins=False))
    form = None if single is None else _single(single, special)
    if form is None or any(word and word in form.begin + form.middle for word in special):
        return None
    both = _after(before, _tried(render, _called(_NAME, _OTHER), tools, begins=False))
    return form if both is None else _several(form, both)


def _single(text: str, special: Sequence[str]) -> CallForm | None:
    """The form of the one call that a turn begins with."""
    name = text.find(_NAME)
    start = text.find("{", name)
    while start >= 0 and not text.startswith(f'{{"{_KEY}"', start):
        start = text.find("{", start + 1)
    if name < 0 or start < 0:
        return None
    _, end = json.JSONDecoder().raw_decode(text, start)
    rest = text[end:]
    ends = [place for word in special if word and (place := rest.find(word)) >= 0]
    if not ends or any(each in text[: end + min(ends)] for each in _IDS):
        return None
    return CallForm(text[:name], text[name + len(_NAME) : start], rest[: min(ends)].rstrip(), None)


def _several(form: CallForm, text: str) -> CallForm:
    """With what stands between two calls, where the template writes both."""
    one = f'{form.begin}{_NAME}{form.middle}{{"{_KEY}": 1}}{form.end}'
    other = text.find(f"{form.begin}{_OTHER}", len(one))
    if not text.startswith(one) or other < 0:
        return form
    return CallForm(form.begin, form.middle, form.end, text[len(one) : other])


def _after(before: str, whole: str) -> str | None:
    return whole[len(before) :] if before and whole.startswith(before) else None


def _tried(render: Render, messages: list[dict[str, Any]], tools: Any, *, begins: bool) -> str:  # noqa: ANN401 as templates take them
    """What the template writes; nothing where it refuses."""
    try:
        return render(messages, tools, begins)
    except ValueError:
        return ""


def _called(*names: str) -> list[dict[str, Any]]:
    """A conversation in which these were called, and that went on: the last turn may be special."""
    calls = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": {_KEY: 1}}}
        for name, key in zip(names, _IDS, strict=False)
    ]
    answers = [
        {"role": "tool", "tool_call_id": key, "name": name, "content": "1"}
        for name, key in zip(names, _IDS, strict=False)
    ]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *answers, _USER]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "integer"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": parameters},
    }
