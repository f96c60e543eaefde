"""How fast is the padded engine on this machine, beside the libraries one would use instead?

    python tests/bench/engine_padded.py --models DIR [--texts 600] [--prompts 64]

Texts are the docstrings of the standard library. Both sides of a comparison get the same token
work in one run; the last line is JSON.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import EncodeRequest, GenerateRequest, Sampling
from engine.tokenizer import Tokenizer
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from worker.models import pull

PEER_BATCH = 32
NEW_TOKENS = 32


def docstrings(count: int) -> list[str]:
    """Docstrings of the standard library's modules, longest 2,000 characters, in a fixed order."""
    found: dict[str, None] = {}
    for module in sorted(pkgutil.iter_modules(), key=lambda module: module.name):
        if module.name not in sys.stdlib_module_names or module.name.startswith(
            ("_", "idle", "antigravity", "this", "turtle", "tkinter", "lib2to3", "test")
        ):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = importlib.import_module(module.name)
            except ImportError:
                continue
        for name in sorted(vars(loaded)):
            text = inspect.getdoc(vars(loaded)[name])
            if text and len(text) > 20:
                found.setdefault(text[:2000])
            if len(found) == count:
                return list(found)
    return list(found)


def bench_embed(folder: Path, count: int) -> dict[str, Any]:
    """Tokens a second, tokenising included, of this engine and of sentence-transformers."""
    tokenizer = Tokenizer.from_dir(folder)
    texts = [t for t in docstrings(count) if len(tokenizer.encode([t])[0]) <= 256]
    tokens = sum(map(len, tokenizer.encode(texts)))
    engine = Engine(EngineConfig(model=folder, kind=Kind.EMBED))
    peer = SentenceTransformer(str(folder), device="cpu")
    peer.encode(texts[:64], batch_size=PEER_BATCH)  # both begin warm
    list(
        engine.run(
            EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokenizer.encode(texts[:64]))
        )
    )
    before = engine.counters

    begun = time.perf_counter()
    list(engine.run(EncodeRequest(n, tuple(ids)) for n, ids in enumerate(tokenizer.encode(texts))))
    ours = time.perf_counter() - begun
    begun = time.perf_counter()
    peer.encode(texts, batch_size=PEER_BATCH)
    theirs = time.perf_counter() - begun

    padded = engine.counters.padded_tokens - before.padded_tokens
    return {
        "texts": len(texts),
        "tokens": tokens,
        "padding": round(1 - tokens / padded, 3),
        "engine_tokens_per_s": round(tokens / ours),
        "sentence_transformers_tokens_per_s": round(tokens / theirs),
    }


def bench_generate(folder: Path, count: int) -> dict[str, Any]:
    """Tokens a second, prompt and answer together, of this engine and of transformers' generate."""
    tokenizer = Tokenizer.from_dir(folder)
    asked = [
        tuple(
            tokenizer.encode_rendered(
                tokenizer.render_chat([{"role": "user", "content": f"Summarise: {text[:400]}"}])
            )
        )
        for text in docstrings(count)
    ]
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE))
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0)

    begun = time.perf_counter()
    list(engine.run(GenerateRequest(n, prompt, sampling) for n, prompt in enumerate(asked)))
    ours = time.perf_counter() - begun
    counters = engine.counters
    theirs, their_tokens = static_generate(folder, asked)
    return {
        "prompts": len(asked),
        "input_tokens": counters.input_tokens,
        "output_tokens": counters.output_tokens,
        "engine_tokens_per_s": round((counters.input_tokens + counters.output_tokens) / ours),
        "engine_output_tokens_per_s": round(counters.output_tokens / ours, 1),
        "transformers_tokens_per_s": round((counters.input_tokens + their_tokens) / theirs),
        "transformers_output_tokens_per_s": round(their_tokens / theirs, 1),
    }


@torch.inference_mode()
def static_generate(folder: Path, asked: list[tuple[int, ...]]) -> tuple[float, int]:
    """Seconds and answer tokens of transformers' generate on sorted, left-padded batches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    ordered = sorted(asked, key=len)
    made = 0
    begun = time.perf_counter()
    for start in range(0, len(ordered), PEER_BATCH):
        batch = ordered[start : start + PEER_BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[end] * (width - len(p)) + list(p) for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=end
        )
        for row in output[:, width:].tolist():
            made += row.index(end) + 1 if end in row else len(row)
    return time.perf_counter() - begun, made


def main() -> None:
    """Run both comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Files().models, help="model cache")
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=64)
    chosen = parser.parse_args()
    catalog = Catalog.load(DEFAULT_CATALOG)
    folders = {model.id: pull(model, chosen.models) for model in catalog.models}
    report = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "embed": bench_embed(folders["all-minilm-l6-v2"], chosen.texts),
        "generate": bench_generate(folders["smollm2-135m-instruct"], chosen.prompts),
    }
    for part in ("embed", "generate"):
        print(part)
        for name, value in report[part].items():
            print(f"  {name:40}{value}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
