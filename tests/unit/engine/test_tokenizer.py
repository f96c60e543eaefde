"""Does our reading of a model's tokenizer files equal transformers', without torch?"""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from engine.errors import ModelLoadError, TemplateError, UnknownPrompt
from engine.plan.room import longest_first
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


NAMES = ["minilm", "smollm", "unigram"]  # WordPiece, BPE and Unigram


@pytest.fixture(scope="session")
def unigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tokenizer of pieces with scores, as XLM-RoBERTa's is made."""
    folder = tmp_path_factory.mktemp("unigram")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = ["▁", "▁the", "▁to", "ken", "s", "▁two", "▁naïve", "é", "▁and", "er", "in", ", ", "▁H"]
    letters = sorted(set("".join(TEXTS)) - set("".join(pieces)) - set("🙂京"))
    vocab = [(token, 0.0) for token in special]
    vocab += [(piece, -2.0 - 0.1 * n) for n, piece in enumerate(pieces)]
    vocab += [(letter, -8.0) for letter in letters]
    backend = Backend(models.Unigram(vocab, unk_id=3, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    """Each of the three."""
    found: Path = request.getfixturevalue(request.param)
    return found


LONG = " ".join(TEXTS) + " the token naïve 🙂 e\u0301\u0302 and two ﬁne tokens" * 3
LIMITS = [4, 5, 6, 9, 16, 33, 1000]


def loaded(folder: Path) -> tuple[Tokenizer, Any]:
    """Our tokenizer of a folder and transformers'."""
    theirs = AutoTokenizer.from_pretrained(folder)
    if theirs.pad_token is None:
        theirs.pad_token = theirs.eos_token
    return Tokenizer.from_dir(folder), theirs


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_is_cut_as_transformers_cuts_it(folder: Path, side: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    if side == "left":
        write(folder, truncation_side=side)
    ours, theirs = loaded(folder)
    for limit in LIMITS:
        texts = [*TEXTS, LONG]
        found = ours.encode(texts, limit=limit)
        assert found == [theirs(t, truncation=True, max_length=limit)["input_ids"] for t in texts]
        assert max(map(len, found)) <= limit


@pytest.mark.parametrize("types", [True, False, None])
def test_pairs_equal_those_of_transformers(
    folder: Path, types: bool | None, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    if types is not None:
        names = ["input_ids", *(["token_type_ids"] if types else [])]
        write(folder, model_input_names=names)
    ours, theirs = loaded(folder)
    texts = [*TEXTS, LONG, LONG[::-1]]
    pairs = list(product(texts, texts[::2]))
    for limit in (None, *LIMITS):
        cutting = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
        # In lists: alone, an empty second text counts as none there.
        firsts, seconds = map(list, zip(*pairs, strict=True))
        expected = theirs(firsts, seconds, **cutting)
        found = ours.encode_pairs(pairs, limit=limit)
        marks = [[int(place >= pair.first) for place in range(len(pair.tokens))] for pair in found]
        assert [pair.tokens for pair in found] == expected["input_ids"]
        assert marks == expected.get("token_type_ids", [[0] * len(row) for row in marks])


def test_the_longer_text_of_a_pair_gives_way_first() -> None:
    def one_by_one(first: int, second: int, room: int) -> tuple[int, int]:
        swapped = first > second
        short, long = sorted((first, second))
        while short + long > room:
            if long > short:
                long -= 1
            else:
                short -= 1
        return (long, short) if swapped else (short, long)

    for first, second, room in product(range(9), range(9), range(18)):
        assert longest_first(first, second, room) == one_by_one(first, second, room)


@pytest.mark.parametrize(("limit", "overlap"), [(8, 0), (8, 2), (9, 5), (40, 7), (1000, 10)])
def test_windows_equal_the_overflowing_pieces_of_transformers(
    folder: Path, limit: int, overlap: int
) -> None:
    ours, theirs = loaded(folder)
    for text in [*TEXTS, LONG, "🙂" * 30]:
        expected = theirs(
            text,
            truncation=True,
            max_length=limit,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        found = ours.encode_windows(text, limit=limit, overlap=overlap)
        assert [window.tokens for window in found] == expected["input_ids"]
        assert [window.spans for window in found] == expected["offset_mapping"]


def test_spans_are_of_characters_not_of_bytes(minilm: Path) -> None:
    text = "🙂🙂 naïve e\u0301lan in 東京"
    [window] = Tokenizer.from_dir(minilm).encode_windows(text, limit=64, overlap=0)
    words = [text[start:end] for start, end in window.spans if end]
    assert words[-2:] == ["東", "京"]
    assert {"naïve", "in"} <= set(words)


@pytest.mark.parametrize(("limit", "overlap"), [(2, 0), (8, 6), (8, 9), (8, -1)])
def test_windows_that_would_never_end_are_refused(minilm: Path, limit: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        Tokenizer.from_dir(minilm).encode_windows("a b c", limit=limit, overlap=overlap)


def test_threads_may_share_a_tokenizer(minilm: Path) -> None:
    tokenizer = Tokenizer.from_dir(minilm)

    def cut(limit: int) -> list[Any]:
        return [
            tokenizer.encode([LONG], limit=limit),
            tokenizer.encode_pairs([(LONG, LONG)], limit=limit),
            tokenizer.encode_windows(LONG, limit=limit, overlap=1),
            tokenizer.encode([LONG]),
        ]

    limits = list(range(5, 60)) * 2
    expected = [cut(limit) for limit in limits]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(cut, limits)) == expected


@pytest.mark.parametrize("name", NAMES)
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
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode_pairs([("fine", "a\ud800b")])
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode_windows("a\ud800b", limit=9, overlap=1)


def test_a_default_prompt_stands_before_every_text(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_encoder, tmp_path / "model")
    config = {"prompts": {"document": "passage: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    expected = Tokenizer.from_dir(tiny_encoder).encode(["passage: text"])
    assert Tokenizer.from_dir(folder).encode(["text"]) == expected


def prompted(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of a model whose publisher names prompts."""
    shutil.copytree(folder, target)
    (target / "config_sentence_transformers.json").write_text(json.dumps(config))
    return target


def test_prompts_are_the_folders_and_the_catalogs_win(tiny_encoder: Path, tmp_path: Path) -> None:
    plain = Tokenizer.from_dir(tiny_encoder)
    own = {"query": "find: ", "document": "passage: "}
    folder = prompted(tiny_encoder, tmp_path / "m", prompts=own, default_prompt_name="document")
    tokenizer = Tokenizer.from_dir(folder, prompts={"query": "ask: ", "title": "title: "})

    assert plain.prompts == {}
    assert dict(tokenizer.prompts) == {**own, "query": "ask: ", "title": "title: "}
    for name, prompt in [(None, "passage: "), ("query", "ask: "), ("title", "title: ")]:
        assert tokenizer.encode(["a", "b"], prompt_name=name) == plain.encode(
            [f"{prompt}a", f"{prompt}b"]
        )
    assert len(tokenizer.encode(["a" * 99], prompt_name="query", limit=10)[0]) == 10


@pytest.mark.parametrize(
    ("known", "said"), [({"query": "q: "}, "it has query"), ({}, "it has none")]
)
def test_an_unknown_prompt_name_says_which_there_are(
    tiny_encoder: Path, known: dict[str, str], said: str
) -> None:
    tokenizer = Tokenizer.from_dir(tiny_encoder, prompts=known)
    with pytest.raises(UnknownPrompt, match=said) as raised:
        tokenizer.encode(["a"], prompt_name="document")
    assert isinstance(raised.value, ValueError)


def test_a_default_prompt_that_is_not_there_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = prompted(tiny_encoder, tmp_path / "m", prompts={}, default_prompt_name="query")
    with pytest.raises(ModelLoadError, match="'query' is not among"):
        Tokenizer.from_dir(folder)


def test_prompts_of_a_model_that_leaves_them_out_of_its_pooling_are_refused(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    folder = prompted(tiny_encoder, tmp_path / "m")
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "include_prompt": False}))
    assert Tokenizer.from_dir(folder, prompts={"query": ""}).encode(["a"])
    with pytest.raises(ModelLoadError, match="out of the pooling"):
        Tokenizer.from_dir(folder, prompts={"query": "q: "})


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
    "engine.plan.room",
    "engine.model.scores",
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
