"""How fast does the padded engine generate on this machine, beside transformers' `generate`?

    python -m tests.bench.generate_padded [--models DIR] [--prompts 64]

Both sides get the same prompts in one run; the last line is JSON.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import GenerateRequest, Sampling
from engine.tokenizer import Tokenizer
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from tests.bench.encode.texts import docstrings
from worker.models import pull

PEER_BATCH = 32
NEW_TOKENS = 32


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
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Files().models, help="model cache")
    parser.add_argument("--prompts", type=int, default=64)
    chosen = parser.parse_args()
    model = Catalog.load(DEFAULT_CATALOG).get("smollm2-135m-instruct")
    assert model is not None
    report = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "generate": bench_generate(pull(model, chosen.models), chosen.prompts),
    }
    for name, value in report["generate"].items():
        print(f"{name:40}{value}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
