"""Are spans those of the transformers pipeline, and does no window's edge show in them?"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.request import TokenClassification
from engine.stub import StubTokenizer
from engine.surface import TokenizerLike, Window
from engine.tokenizer import Tokenizer
from service.bodies import check
from service.bodies.check import InvalidBody, Rules
from service.bodies.classify import Aggregation
from service.catalog import Model, ModelKind
from worker import readings
from worker.readings import Tag
from worker.replies.spans import Token, merged, tagged

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "OTHER")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = [
    "Ada Lovelace met Charles Babbage in London.",
    "naïve café owners, e.g. Zoë's, don't mind: 東京 is far 🙂 away!",
    "x",
    "Unwritable ☃ snow",
]
RULES = Rules(max_inputs=10)


def tag(tokenizer: TokenizerLike, texts: list[str], limit: int = 64, **given_too: Any) -> Tag:
    body = {"model": "m", "input": texts, **given_too}
    checked = check.classify(body, RULES, ModelKind.TOKEN_CLASSIFY)
    model = Model(
        id="m",
        kind=ModelKind.TOKEN_CLASSIFY,
        source="stub:",
        price_input="1",
        context_length=limit,
    )
    prompt = readings.read(checked, model=model, tokenizer=tokenizer)
    assert isinstance(prompt, Tag)
    return prompt


def write_word_piece(folder: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzéïë"
    pieces = [
        *letters,
        *(f"##{letter}" for letter in letters),
        *".,:!'東京",
        "love",
        "##lace",
        "met",
    ]
    backend = Backend(
        models.WordPiece(
            vocab={token: n for n, token in enumerate([*SPECIAL, *pieces])}, unk_token="[UNK]"
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    write(folder, backend)


def write_unigram(folder: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyzéïë.,:!'東京"
    scores = [(token, -10.0) for token in [*letters, *letters.upper(), "▁"]]
    more = [("▁me", -3.0), ("▁A", -4.0), ("Love", -5.0), ("lace", -5.0)]
    backend = Backend(
        models.Unigram([*((token, 0.0) for token in SPECIAL), *scores, *more], unk_id=1)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    write(folder, backend)


def write(folder: Path, backend: Backend) -> None:
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)


@pytest.fixture(scope="module", params=[write_word_piece, write_unigram], ids=["words", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random tagger whose labels change often."""
    path = tmp_path_factory.mktemp("tagger")
    request.param(path)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        id2label=dict(enumerate(LABELS)),
        label2id={label: n for n, label in enumerate(LABELS)},
    )
    model = transformers.BertForTokenClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    model.save_pretrained(path)
    return path


def results_of(model: Any, prompt: Tag) -> list[TokenClassification]:
    found = []
    for reading in prompt.readings:
        with torch.no_grad():
            logits = model(torch.tensor([reading.tokens])).logits[0]
        scores = logits.softmax(-1).numpy()
        found.append(TokenClassification("id", scores, len(reading.tokens)))
    return found


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_spans_of_short_texts_are_the_pipelines(folder: Path, aggregation: Aggregation) -> None:
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        # The pipeline warns where a tokenizer does not mark what goes on with a word.
        warnings.simplefilter("ignore", UserWarning)
        pipeline: Any = transformers.pipeline(
            "token-classification",
            model=model,
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            aggregation_strategy=aggregation.value,
        )
        wanted = [pipeline(text) for text in TEXTS]
    prompt = tag(Tokenizer.from_dir(folder), TEXTS, aggregation=aggregation)
    data = tagged(prompt, results_of(model, prompt), LABELS, created=1).body["data"]
    assert [entry["index"] for entry in data] == list(range(len(TEXTS)))
    assert sum(len(entry["spans"]) for entry in data) > 10
    name = "entity" if aggregation is Aggregation.NONE else "entity_group"
    for text, expected, entry in zip(TEXTS, wanted, data, strict=True):
        assert [(each["label"], each["start"], each["end"]) for each in entry["spans"]] == [
            (each[name], each["start"], each["end"]) for each in expected
        ]
        np.testing.assert_allclose(
            [each["score"] for each in entry["spans"]],
            [each["score"] for each in expected],
            atol=1e-6,
        )
        for each in entry["spans"]:
            assert each["text"] == text[each["start"] : each["end"]]


def knowing(prompt: Tag) -> list[TokenClassification]:
    """Of a tagger for which a capital letter is a person, wherever its window was cut."""
    found = []
    for window in (each for text in prompt.windows for each in text):
        names = [chr(token).isupper() if token < 256 else False for token in window.tokens]
        scores = np.where(np.array(names)[:, None], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1])
        found.append(TokenClassification("id", scores.astype(np.float32), len(window.tokens)))
    return found


@given(
    text=st.text("abC D", min_size=1, max_size=60),
    limit=st.integers(min_value=8, max_value=20),
    overlap=st.integers(min_value=0, max_value=4),
    aggregation=st.sampled_from(Aggregation),
)
def test_a_text_in_windows_has_the_spans_that_it_has_whole(
    text: str, limit: int, overlap: int, aggregation: Aggregation
) -> None:
    labels = ("O", "B-PER", "I-PER")
    found = []
    for most in (limit, 1_000):
        prompt = tag(
            StubTokenizer(), [text], most, overlap=min(overlap, most // 2), aggregation=aggregation
        )
        data = tagged(prompt, knowing(prompt), labels, created=1).body["data"]
        found.append([(s["label"], s["start"], s["end"], s["text"]) for s in data[0]["spans"]])
    assert found[0] == found[1]


def test_no_name_is_lost_behind_the_context() -> None:
    text = "a " * 700 + "Ada"
    prompt = tag(StubTokenizer(), [text], 512)
    assert len(prompt.windows[0]) > 2
    reply = tagged(prompt, knowing(prompt), ("O", "B-PER", "I-PER"), created=1)
    assert [each["text"] for each in reply.body["data"][0]["spans"]] == ["A"]
    # Every window is computed, and counted.
    assert reply.usage.taken == sum(len(window.tokens) for window in prompt.windows[0])


def test_of_a_token_in_two_windows_the_one_with_more_text_around_it_counts() -> None:
    def window(name: float, *starts: int) -> list[Token]:
        return [Token(n, n + 1, np.array([name], dtype=np.float32)) for n in starts]

    left, right = window(1, 0, 1, 2, 3, 4, 5), window(2, 2, 3, 4, 5, 6, 7)
    for windows in ([left, right], [right, left]):
        tokens = merged(windows)
        assert [token.start for token in tokens] == list(range(8))
        assert [float(token.scores[0]) for token in tokens] == [1, 1, 1, 1, 2, 2, 2, 2]
    apart = merged([window(1, 0, 1), window(2, 2, 3)])
    assert [float(token.scores[0]) for token in apart] == [1, 1, 2, 2]
    assert merged([[]]) == []


@pytest.mark.parametrize(("limit", "overlap"), [(64, 33), (64, 10**9), (4, 2)])
def test_windows_share_half_of_their_tokens_at_most(limit: int, overlap: int) -> None:
    with pytest.raises(InvalidBody) as caught:
        tag(StubTokenizer(), ["a long text"], limit, overlap=overlap)
    assert caught.value.fault.param == "overlap"
    assert len(tag(StubTokenizer(), ["x" * 100], 64, overlap=32).windows[0]) == 3


def test_a_text_without_tokens_has_no_spans() -> None:
    prompt = Tag(
        check.classify({"model": "m", "input": " "}, RULES, ModelKind.TOKEN_CLASSIFY),
        ((Window([1, 2], [(0, 0), (0, 0)]),),),
        (((),),),
    )
    scores = np.ones((2, 3), dtype=np.float32)
    for aggregation in Aggregation:
        body = prompt.body.model_copy(update={"aggregation": aggregation})
        one = Tag(body, prompt.windows, prompt.continues)
        reply = tagged(one, [TokenClassification("id", scores, 2)], ("O", "A", "B"), created=1)
        assert reply.body["data"][0]["spans"] == []
