"""Does our reading of a model's tokenizer files equal transformers', without torch?"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.errors import ModelLoadError, TemplateError
from engine.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]  # `python -c` imports from where it starts
TEXTS = [
    "",
    " ",
    "Hello, World!",
    "two  spaces\n\n\tand tabs ",
    "naïve café — 東京 🙂 \u2028 e\u0301",
    "don't [MASK] <|im_start|> </s> 12345.678",
    "\x00 nul and \u200b more",
]
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris <|im_end|>"},
    {"role": "user", "content": "And of Japan? 🙂"},
]


@pytest.mark.parametrize("name", ["minilm", "smollm"])
def test_token_ids_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TEXTS) == [theirs(text)["input_ids"] for text in TEXTS]
    for text in TEXTS:
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_prompt(text) == theirs(text)["input_ids"]
        assert ours.encode_rendered(text) == plain
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
        assert ours.decode(plain, skip_special_tokens=False) == theirs.decode(plain)
    assert ours.vocab_size == len(theirs)


def test_a_chat_is_written_as_transformers_writes_it(smollm: Path) -> None:
    ours, theirs = Tokenizer.from_dir(smollm), AutoTokenizer.from_pretrained(smollm)
    for chat in (CHAT, CHAT[1:2]):
        rendered = ours.render_chat(chat)
        assert rendered == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        assert ours.encode_rendered(rendered) == ids["input_ids"]


def test_context_lengths_are_those_of_the_models(minilm: Path, smollm: Path) -> None:
    assert Tokenizer.from_dir(minilm).context_length == 256
    assert Tokenizer.from_dir(smollm).context_length == 8192


def test_a_text_is_never_cut_or_padded_whatever_the_file_says(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path.write_text(json.dumps(content))
    short, long = Tokenizer.from_dir(folder).encode(["ab", "a" * 500])
    assert (len(short), len(long)) == (4, 502)


def write(folder: Path, **config: object) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Tokenizer.from_dir(folder)


@pytest.fixture
def plain(make_decoder: object, tmp_path: Path) -> Path:
    """A folder whose tokenizer.json puts nothing around a text."""
    assert callable(make_decoder)
    return shutil.copytree(make_decoder("llama"), tmp_path / "model")


def test_a_bos_is_written_where_the_config_asks_for_it_and_once_in_a_chat(plain: Path) -> None:
    assert Tokenizer.from_dir(plain).encode_prompt("a")[0] != 1
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = write(plain, add_bos_token=True, chat_template=template)
    assert tokenizer.encode_prompt("a")[0] == 1
    assert tokenizer.encode(["a"])[0][:1] == [1]
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<s>hi"
    assert tokenizer.encode_rendered(rendered).count(1) == 1


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "str"),
        ("{{ messages[3].content }}", [], "no element"),
        ("{% for %}", [], "."),
        ("{{ messages.__class__.__mro__ }}", [], "unsafe"),
    ],
)
def test_messages_that_a_template_refuses_are_a_template_error(
    plain: Path, template: str, messages: list[dict[str, object]], said: str
) -> None:
    tokenizer = write(plain, chat_template=template)
    with pytest.raises(TemplateError, match=said) as raised:
        tokenizer.render_chat(messages)
    assert isinstance(raised.value, ValueError)


def test_a_model_without_a_template_takes_no_chat(plain: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer.from_dir(plain).render_chat([{"role": "user", "content": "hi"}])


def test_a_lone_surrogate_is_a_value_error(plain: Path) -> None:
    tokenizer = Tokenizer.from_dir(plain)
    for encode in (tokenizer.encode_prompt, tokenizer.encode_rendered):
        with pytest.raises(ValueError, match="surrogates"):
            encode("a\ud800b")
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode(["fine", "a\ud800b"])


def test_a_default_prompt_stands_before_every_text(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "model")
    config = {"prompts": {"document": "passage: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    expected = Tokenizer.from_dir(tiny_encoder).encode(["passage: text"])
    assert Tokenizer.from_dir(folder).encode(["text"]) == expected


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        Tokenizer.from_dir(tmp_path)


LIGHT = [
    "engine.request",
    "engine.config",
    "engine.errors",
    "engine.surface",
    "engine.intake",
    "engine.stub",
    "engine.tokenizer",
    "engine.plan.admit",
    "engine.plan.buckets",
    "engine.plan.budget",
    "engine.plan.waiting",
]


def test_planning_and_the_stub_need_no_torch() -> None:
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {LIGHT}]; "
        "print([name for name in ('torch', 'service', 'worker') if name in sys.modules])"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert outcome.stdout.strip() == "[]"
