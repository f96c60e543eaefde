"""Which engines and models do the engine's tests run on? Tiny random ones and two real ones."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.stub import StubEngine
from engine.surface import EngineLike
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from worker.models import pull

PAD, BEGIN, END = 0, 1, 2
VOCAB_SIZE = 3 + 256
SMALL = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
LLAMA_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8),
    "mistral-window": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=128
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **SMALL,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "opt": lambda: transformers.OPTConfig(
        **SMALL,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
}


def write_tokenizer(folder: Path, *, ends: bool, **config: Any) -> None:
    """A tokenizer of single bytes; `ends` puts <s> and </s> around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(special)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair=None, special_tokens=[("<s>", BEGIN), ("</s>", END)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and lose much where test processes share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random decoder of a named architecture."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(DECODERS[name]())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(4)  # so that the likeliest token is so by far
            model.save_pretrained(folder)
            write_tokenizer(folder, ends=False)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random BERT: mean pooling, normalised, up to 64 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        pad_token_id=PAD,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    transformers.BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, ends=True)
    write_modules(folder, ["Transformer", "Pooling", "Normalize"])
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def write_modules(folder: Path, names: list[str]) -> None:
    """A modules.json of sentence-transformers' older form."""
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real all-MiniLM-L6-v2, pulled into the model cache if it is not there."""
    return real_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The real SmolLM2-135M-Instruct, pulled and converted if it is not there."""
    return real_model("smollm2-135m-instruct")


def real_model(model_id: str) -> Path:
    """The folder of a model of the packaged catalog."""
    model = Catalog.load(DEFAULT_CATALOG).get(model_id)
    assert model is not None
    return pull(model, Files().models)


@pytest.fixture(scope="session")
def ragged_texts() -> list[str]:
    """2,100 texts of a word to a page, from the sources of the standard library."""
    root = Path(json.__file__).parent.parent
    lines = [
        line.strip()
        for name in ("argparse.py", "typing.py", "inspect.py", "tarfile.py", "subprocess.py")
        for line in (root / name).read_text(encoding="utf-8").splitlines()
        if len(line.strip()) > 20
    ]
    generator = random.Random(3)
    sizes = [generator.choice((1,) * 12 + (2, 4, 9)) for _ in range(2100)]
    return [" ".join(lines[n : n + size]) for n, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def make_classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """The folder of a tiny random BERT that classifies texts, pairs or tokens."""
    made: dict[Kind, Path] = {}
    label_names = {
        Kind.CLASSIFY: ("bad", "so-so", "good"),
        Kind.SCORE: ("relevant",),
        Kind.TOKEN_CLASSIFY: ("O", "B-NAME", "I-NAME"),
    }

    def make(kind: Kind) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind.value)
            torch.manual_seed(7)
            config = transformers.BertConfig(
                vocab_size=VOCAB_SIZE,
                pad_token_id=PAD,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=128,
                id2label=dict(enumerate(label_names[kind])),
            )
            auto = (
                transformers.AutoModelForTokenClassification
                if kind is Kind.TOKEN_CLASSIFY
                else transformers.AutoModelForSequenceClassification
            )
            model = auto.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)  # so that texts differ by more than rounding
            model.save_pretrained(folder)
            write_tokenizer(folder, ends=True)
            made[kind] = folder
        return made[kind]

    return make


MakeEngine = Callable[..., EngineLike]


@pytest.fixture(params=["stub", "tiny"])
def make_engine(
    request: pytest.FixtureRequest,
    make_decoder: Callable[[str], Path],
    make_classifier: Callable[[Kind], Path],
    tiny_encoder: Path,
) -> MakeEngine:
    """An engine of the asked kind: the stub or a real one on a tiny model, context 64."""

    def model_of(kind: Kind) -> Path:
        match kind:
            case Kind.GENERATE:
                return make_decoder("llama")
            case Kind.EMBED:
                return tiny_encoder
            case Kind.CLASSIFY | Kind.SCORE | Kind.TOKEN_CLASSIFY:
                return make_classifier(kind)

    def make(kind: Kind, **changes: Any) -> EngineLike:
        config = EngineConfig(model=model_of(kind), kind=kind, context_length=64)
        config = dataclasses.replace(config, **changes)
        return StubEngine(config) if request.param == "stub" else Engine(config)

    return make
