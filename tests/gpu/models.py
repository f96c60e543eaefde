"""On which models do the device's tests run? Random ones, made on the device, saved as ours are.

Imports nothing but torch, transformers and tokenizers: a lent machine may hold no more.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors
from torch import Tensor

BEGIN, END = 1, 2
_VOCAB = {"<pad>": 0, "<s>": BEGIN, "</s>": END, "<unk>": 3}
_SMALL = {
    "vocab_size": 128,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
}
_ENDS = {"bos_token_id": BEGIN, "eos_token_id": END}


@dataclass(frozen=True, slots=True)
class Made:
    """How a random model is built, and how its tokens are pooled."""

    config: Callable[[], Any]
    pooling: str = "mean"


TINY = {
    "bert": Made(lambda: transformers.BertConfig(**_SMALL)),
    "roberta": Made(lambda: transformers.RobertaConfig(**_SMALL)),
    "modernbert-window": Made(
        lambda: transformers.ModernBertConfig(
            **_SMALL, local_attention=16, global_attn_every_n_layers=2, cls_token_id=BEGIN,
            sep_token_id=END, bos_token_id=BEGIN, eos_token_id=END,
        )
    ),
    "qwen3-causal-grouped": Made(
        lambda: transformers.Qwen3Config(
            **_SMALL, num_key_value_heads=2, head_dim=16, bos_token_id=BEGIN, eos_token_id=END
        ),
        pooling="lasttoken",
    ),
}  # fmt: skip

BERT_LARGE = Made(
    lambda: transformers.BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
    )
)

TINY_DECODERS = {
    "llama": Made(lambda: transformers.LlamaConfig(**_SMALL, num_key_value_heads=2, **_ENDS)),
    "qwen3": Made(
        lambda: transformers.Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=16, **_ENDS)
    ),
    "mistral-window": Made(
        lambda: transformers.MistralConfig(
            **_SMALL, num_key_value_heads=2, sliding_window=16, **_ENDS
        )
    ),
    "gemma2-softcap": Made(
        lambda: transformers.Gemma2Config(
            **_SMALL, num_key_value_heads=2, head_dim=16, sliding_window=16, **_ENDS
        )
    ),
    "gpt-oss-sinks": Made(
        lambda: transformers.GptOssConfig(
            **_SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=16, **_ENDS
        )
    ),
}  # fmt: skip

LLAMA_1B = Made(
    lambda: transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        **_ENDS,
    )
)

MINILM = Made(
    lambda: transformers.BertConfig(
        vocab_size=30522,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
    )
)


def save(
    made: Made,
    folder: Path,
    device: str,
    *,
    dtype: str = "float32",
    gain: float = 1,
    auto: Any = transformers.AutoModel,
    endless: bool = False,
) -> Path:
    """Random weights in a folder, with a tokenizer; `gain` above 1 makes texts differ more.

    An `endless` decoder never finds the closing token the likeliest.
    """
    torch.manual_seed(7)
    with torch.device(device):
        model = auto.from_config(made.config(), dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
        if endless:
            model.get_output_embeddings().weight[END] = 0
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    backend = Backend(models.WordLevel(_VOCAB, unk_token="<unk>"))
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=None, special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    backend.save(str(folder / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


@torch.inference_mode()
def vectors_slowly(folder: Path, pooling: str, texts: Sequence[Sequence[int]]) -> Tensor:
    """What the texts' vectors must be: one padded batch in float32 on the CPU, plain forward.

    Returns float32 [texts, width], each of length 1.
    """
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).float()
    if pooling == "mean":
        vectors = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    else:
        vectors = hidden[torch.arange(len(ids)), mask.sum(dim=1) - 1]
    return torch.nn.functional.normalize(vectors, dim=-1)


def attend_slowly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """What attention over a pack must be: each sequence on its own, by its mask, in float32.

    query: [tokens, heads, dim]; key, value: [tokens, key heads, dim]; returns the shape of query.
    """
    attended = []
    pieces = zip(*(x.float().split(list(lengths)) for x in (query, key, value)), strict=True)
    for q, k, v in pieces:
        place = torch.arange(len(q), device=q.device)
        apart = place[:, None] - place[None, :]
        seen = torch.ones_like(apart, dtype=torch.bool)
        if causal:
            seen &= apart >= 0
        if window is not None:
            seen &= apart.abs() < window
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=scale, enable_gqa=True
        )
        attended.append(found[0].transpose(0, 1))
    return torch.cat(attended)
