"""Which encoders are tried in packs? Tiny ones of each kind of attention and position."""

from collections.abc import Callable
from typing import Any

import transformers

from tests.unit.engine.conftest import SMALL

BERT_LIKE: dict[str, Any] = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA_LIKE: dict[str, Any] = {**BERT_LIKE, "num_key_value_heads": 2, "head_dim": 8}
# A window of 8 hides most of a text of 40 tokens.
GEMMA_LIKE: dict[str, Any] = {**LLAMA_LIKE, "sliding_window": 8}
ARCHITECTURES: dict[str, tuple[Callable[[], Any], str, str]] = {  # config, pooling, path
    "albert": (lambda: transformers.AlbertConfig(**BERT_LIKE, embedding_size=16), "mean", "packed"),
    "bert": (lambda: transformers.BertConfig(**BERT_LIKE), "mean", "packed"),
    "distilbert": (
        lambda: transformers.DistilBertConfig(
            **SMALL, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=128
        ),
        "cls",
        "packed",
    ),
    "electra": (
        lambda: transformers.ElectraConfig(**BERT_LIKE, embedding_size=16),
        "max",
        "packed",
    ),
    "embedding-gemma": (
        lambda: transformers.Gemma3TextConfig(
            **{**GEMMA_LIKE, "num_hidden_layers": 6}, use_bidirectional_attention=True
        ),
        "mean",
        "packed",
    ),
    "gemma-causal": (
        lambda: transformers.Gemma3TextConfig(**{**GEMMA_LIKE, "num_hidden_layers": 6}),
        "lasttoken",
        "packed",
    ),
    "gemma2-softcap": (
        lambda: transformers.Gemma2Config(**GEMMA_LIKE, attn_logit_softcapping=2.0),
        "lasttoken",
        "packed",
    ),
    "mistral-window": (
        lambda: transformers.MistralConfig(**GEMMA_LIKE),
        "lasttoken",
        "packed",
    ),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **{**BERT_LIKE, "num_hidden_layers": 4},
            local_attention=8,
            cls_token_id=1,
            sep_token_id=2,
        ),
        "cls",
        "packed",
    ),
    "nomic-bert": (lambda: transformers.NomicBertConfig(**BERT_LIKE), "mean", "packed"),
    "qwen3": (lambda: transformers.Qwen3Config(**LLAMA_LIKE), "lasttoken", "packed"),
    "qwen3-dynamic": (
        lambda: transformers.Qwen3Config(
            **LLAMA_LIKE,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        "lasttoken",
        "padded",
    ),
    "roberta": (lambda: transformers.RobertaConfig(**BERT_LIKE), "mean", "packed"),
    "xlm-roberta": (lambda: transformers.XLMRobertaConfig(**BERT_LIKE), "cls", "packed"),
    "deberta": (
        lambda: transformers.DebertaV2Config(
            **BERT_LIKE, relative_attention=True, pos_att_type=["p2c", "c2p"]
        ),
        "mean",
        "padded",
    ),
    "mpnet": (lambda: transformers.MPNetConfig(**BERT_LIKE), "mean", "padded"),
}
