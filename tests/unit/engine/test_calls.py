"""Is it read from a chat template how its model calls tools?"""

from dataclasses import replace
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.calls import Call, CallForm, call_form

# The parts that matter of Qwen2.5's and Llama 3's templates.
HERMES = r"""
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.tool_calls %}
{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

PLAIN = r"""
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\n\n' }}
{%- if tools and loop.first %}{{- 'Respond with {"name": function name, "parameters": object}.' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{{- message.content + '<|im_end|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
{{- '<|im_start|>assistant\n\n{"name": "' + message.tool_calls[0].function.name }}
{{- '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}
{{- '}<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n\n' + message.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""

WITHOUT = "{% for m in messages %}<|im_start|>{{ m.role + m.content }}<|im_end|>{% endfor %}"
WITH_IDS = HERMES.replace(
    """{{- '}\\n</tool_call>' }}""", """{{- ', "id": "' + call.id + '"}' }}"""
)
# The parts that matter of Mistral 7B v0.3's: tools are shown to the last question alone.
MISTRAL = r"""
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == asked[-1] %}{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{{- tool | tojson }}{{- ', ' if not loop.last }}{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']<|im_end|>' }}{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + message.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}"""

SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}


def form_of(template: str, special: dict[str, int] = SPECIAL) -> CallForm | None:
    def render(messages: Any, tools: Any, begins: Any) -> str:
        try:
            return str(
                render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=begins,
                )[0][0]
            )
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    return call_form(render, special)


TAGGED = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
LISTED = CallForm(
    '{"name": "', '", "arguments": ', ', "id": "', ", ",
    opening=" [", closing="]", id_end='"}', token=5,
)  # fmt: skip
BARE = CallForm('{"name": "', '", "parameters": ', "}", None)


@pytest.mark.parametrize(
    ("template", "form", "sign"), [(HERMES, TAGGED, "<tool_call>"), (PLAIN, BARE, "")]
)
def test_a_form_is_what_the_template_makes_of_calls(
    template: str, form: CallForm, sign: str
) -> None:
    assert form_of(template) == form
    assert form.sign == sign


def test_a_template_without_a_place_for_tools_has_no_form() -> None:
    assert form_of(WITHOUT) is None
    first = HERMES.replace('{"name": "\' + call', '{"id": "\' + call.id + \'", "name": "\' + call')
    assert first.count("call.id") == 1
    assert form_of(first) is None  # an id is read where a call ends, and nowhere else


def test_a_call_may_end_with_its_id() -> None:
    assert form_of(WITH_IDS) == replace(TAGGED, end=', "id": "', id_end='"}')


def test_a_list_of_calls_behind_a_special_token_is_known() -> None:
    assert form_of(MISTRAL, {**SPECIAL, "[TOOL_CALLS]": 5}) == LISTED
    plain = form_of(MISTRAL)
    assert plain is not None
    assert (plain.token, plain.opening, plain.sign) == (None, "[TOOL_CALLS] [", "[TOOL_CALLS] [")


def test_a_special_word_may_begin_a_call() -> None:
    form = form_of(HERMES, {**SPECIAL, "<tool_call>": 5})
    assert form is not None
    assert (form.token, form.head, form.end) == (5, '\n{"name": "', "}\n</tool_call>")
    assert form.between is None  # what stands between two calls is no text


def test_listed_calls_are_read_with_their_ids() -> None:
    one = '{"name": "a", "arguments": {"x": 1}, "id": "abcDEF123"}'
    two = '{"name": "b", "arguments": {}, "id": "000000000"}'
    calls = [Call("a", '{"x": 1}', "abcDEF123"), Call("b", "{}", "000000000")]
    for before in ("", " ", "Let me see. "):
        assert LISTED.read(f"{before}[{one}, {two}]") == (before, calls)
    assert LISTED.read(f"[{one}, {two[:-5]}") == ("", calls[:1])
    assert LISTED.read(f"[{one[:-2]}") == (f"[{one[:-2]}", [])
    assert LISTED.read("[1, 2]") == ("[1, 2]", [])


def test_calls_are_read_as_they_are_written() -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {"x": "}\\n</tool_call>"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    calls = [Call("a", '{"x": "}\\n</tool_call>"}'), Call("b", "{}")]
    assert TAGGED.read(f"{one}\n{two}") == ("", calls)
    assert TAGGED.read(f"Well.\n{one}") == ("Well.\n", calls[:1])
    assert TAGGED.read(f"{one}\n{two[:-3]}") == ("", calls[:1])  # the other was cut
    assert BARE.read('{"name": "a", "parameters": {"x": 1}}') == ("", [Call("a", '{"x": 1}')])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Nothing is called.",
        "<tool_call>\n",
        '<tool_call>\n{"name": "a", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "a", "arguments": {"x": 1',
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}',
    ],
)
def test_what_is_no_whole_call_stays_text(text: str) -> None:
    assert TAGGED.read(text) == (text, [])
    assert BARE.read(f"Say {text}") == (f"Say {text}", [])
