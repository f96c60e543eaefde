"""How does a model write that it calls a function? As its chat template writes such calls.

The template is shown a conversation with calls of made-up names, and what it makes of them is read.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_NAME, _OTHER, _KEY = "probed_function", "other_function", "probed_key"
_IDS = ("probed001", "probed002")
_ID = re.compile("[A-Za-z0-9]{9}")
_USER = {"role": "user", "content": "probe"}

Render = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Call:
    """A function, and its arguments as JSON; `id` where the model's calls name themselves."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call is `begin` name `middle` arguments `end`; `between` calls of one turn, None where a
    turn has one call at most.

    With `id_end` an id of nine letters or digits comes between `end` and it. `opening` and
    `closing` stand once around all calls of a turn; before them the special `token`, which is no
    text.
    """

    begin: str
    middle: str
    end: str
    between: str | None
    opening: str = ""
    closing: str = ""
    id_end: str | None = None
    token: int | None = None

    @property
    def head(self) -> str:
        """What stands before the first call's name."""
        return self.opening + self.begin

    @property
    def sign(self) -> str:
        """The first word of a call, by which a text is known to call; "" where it is plain JSON."""
        word = self.head.split("{")[0].split("\n")[0].strip()
        return word if any(map(str.isalpha, word)) else ""

    def read(self, text: str) -> tuple[str, list[Call]]:
        """What stands before the calls, and the calls that are whole."""
        # Behind a special token a space may be no part of the text.
        head = self.head if self.token is None else self.head.lstrip()
        start = text.find(head)
        if start < 0 or (not self.sign and self.token is None and text[:start].strip()):
            return text, []
        calls, place = [], start + len(head) - len(self.begin)
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
        call, place = Call(text[named:middle], text[start:end]), end + len(self.end)
        if self.id_end is None:
            return call, place
        own = _ID.match(text, place)
        if own is None or not text.startswith(self.id_end, own.end()):
            return None
        return replace(call, id=own[0]), own.end() + len(self.id_end)


def call_form(render: Render, special: Mapping[str, int]) -> CallForm | None:
    """How the template writes calls; None where it writes none, or in a way that is not known.

    `render(messages, tools, begins)` writes messages, up to where an answer begins where `begins`;
    `special` are the tokens that are no text.
    """
    tools = [_tool(_NAME), _tool(_OTHER)]
    before = _tried(render, [_USER], tools, begins=True)
    if _NAME not in before:
        return None
    for goes_on in (True, False):

        def written(*names: str, goes_on: bool = goes_on) -> str | None:
            called = _called(*names, goes_on=goes_on)
            return _after(before, _tried(render, called, tools, begins=False))

        single, both = written(_NAME), written(_NAME, _OTHER)
        form = None if single is None else _single(single, special)
        if form is not None:
            return _named(form if both is None else _several(form, both, special))
    return None


def _single(text: str, special: Mapping[str, int]) -> CallForm | None:
    """The form of the one call that a turn begins with."""
    token = next((word for word in special if word and text.startswith(word)), "")
    text = text.removeprefix(token)
    name = text.find(_NAME)
    start = text.find("{", name)
    while start >= 0 and not text.startswith(f'{{"{_KEY}"', start):
        start = text.find("{", start + 1)
    if name < 0 or start < 0:
        return None
    _, end = json.JSONDecoder().raw_decode(text, start)
    if any(word in text[:end] for word in (*special, *_IDS) if word):
        return None
    behind = _up_to_special(text[end:], special)
    if behind is None:
        return None
    begin, middle = text[:name], text[name + len(_NAME) : start]
    return CallForm(begin, middle, behind.rstrip(), None, token=special[token] if token else None)


def _several(form: CallForm, both: str, special: Mapping[str, int]) -> CallForm:
    """With what stands between two calls, where the template writes both.

    It may be all that ends one and begins another, or calls are a list, and the list is opened and
    closed once.
    """
    one = f'{form.begin}{_NAME}{form.middle}{{"{_KEY}": 1}}'
    start = both.find(one)
    other = both.find(_OTHER, start + len(one))
    if start < 0 or other < 0:
        return form
    step = both[start + len(one) : other]
    if any(word in step for word in special if word):
        return form
    if step.startswith(form.end) and step[len(form.end) :].endswith(form.begin):
        between = step[len(form.end) : len(step) - len(form.begin)]
        return replace(form, between=between)
    begin = _alike(form.begin[::-1], step[::-1])[::-1]
    end = _alike(form.end, step.removesuffix(begin))
    if "{" not in begin or "}" not in end:
        return form
    begin = begin[begin.index("{") :]
    return replace(
        form,
        begin=begin,
        end=end,
        between=step[len(end) : len(step) - len(begin)],
        opening=form.begin.removesuffix(begin),
        closing=form.end.removeprefix(end),
    )


def _named(form: CallForm) -> CallForm | None:
    """With the place of a call's own id, if its end has one; None where it stands elsewhere."""
    rest = "".join((form.closing, form.between or "", form.opening))
    if any(each in rest for each in _IDS):
        return None
    if _IDS[0] not in form.end:
        return form
    end, id_end = form.end.split(_IDS[0], 1)
    return None if _IDS[0] in id_end else replace(form, end=end, id_end=id_end)


def _alike(one: str, other: str) -> str:
    """With what both begin."""
    pairs = zip(one, other, strict=False)
    return one[: next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _up_to_special(text: str, special: Mapping[str, int]) -> str | None:
    """What stands before the first special token; None where there is none."""
    ends = [place for word in special if word and (place := text.find(word)) >= 0]
    return text[: min(ends)] if ends else None


def _after(before: str, whole: str) -> str | None:
    return whole[len(before) :] if before and whole.startswith(before) else None


def _tried(render: Render, messages: list[dict[str, Any]], tools: Any, *, begins: bool) -> str:  # noqa: ANN401 as templates take them
    """What the template writes; nothing where it refuses."""
    try:
        return render(messages, tools, begins)
    except ValueError:
        return ""


def _called(*names: str, goes_on: bool) -> list[dict[str, Any]]:
    """A conversation in which these were called.

    As a rule it goes on, since the last turn may be special; some templates show tools to the last
    question alone, and allow no second one behind calls.
    """
    calls = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": {_KEY: 1}}}
        for name, key in zip(names, _IDS, strict=False)
    ]
    answers = [
        {"role": "tool", "tool_call_id": key, "name": name, "content": "1"}
        for name, key in zip(names, _IDS, strict=False)
    ]
    turns: list[dict[str, Any]] = [_USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    return [*turns, *answers, _USER] if goes_on else turns


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "integer"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": parameters},
    }
