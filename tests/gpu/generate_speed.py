"""How fast does one device generate: next tokens at 1, 32 and 256 sequences, and prompts?

    python tests/gpu/generate_speed.py [--device cpu --shape tiny] [--graphs]

Random weights, random prompts with nothing in common, so nothing needs to be fetched. Prints what
it measured, the last line as JSON. Needs the repository's root on PYTHONPATH.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import Failure, GenerateRequest, Sampling
from tests.gpu.encode_speed import copy_rate, seconds_of, settle
from tests.gpu.models import LLAMA_1B, TINY_DECODERS, Made, save
from tests.gpu.telling import tell


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run."""

    made: Made
    dtype: str
    sequences: tuple[int, ...]  # that are decoded side by side
    prompt: int  # tokens of each
    steps: int  # tokens made of each, about
    prompts: int  # computed for a single token each
    long: int  # tokens of each of those
    step_tokens: int
    product: int  # rows and columns of the product that says what the device can do
    copied_bytes: int


TRIALS = {
    "llama-1b": Trial(LLAMA_1B, "bfloat16", (1, 32, 256), 128, 128, 256, 1024, 8192, 8192, 2 << 30),
    "tiny": Trial(TINY_DECODERS["llama"], "float32", (1, 4, 8), 12, 8, 6, 60, 128, 128, 1 << 20),
}


@dataclass(frozen=True, slots=True)
class Costs:
    """What a decoder of Llama's shape moves and computes at least."""

    layers: int
    heads: int
    head_dim: int
    kv_heads: int
    weights: int  # numbers of the matrices that every token goes through, but the head's
    head: int  # numbers of the head's
    bytes_per_number: int

    @classmethod
    def of(cls, config: Any, dtype: str) -> "Costs":
        width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        layer = 2 * width * dim * (heads + kv_heads) + 3 * width * inner
        return cls(
            config.num_hidden_layers,
            heads,
            dim,
            kv_heads,
            config.num_hidden_layers * layer,
            config.vocab_size * width,
            getattr(torch, dtype).itemsize,
        )

    def bytes_of_step(self, lengths: list[int]) -> int:
        """Weights once, keys and values of each sequence once."""
        kept = 2 * self.layers * self.kv_heads * self.head_dim * sum(lengths)
        return self.bytes_per_number * (self.weights + self.head + kept)

    def operations_of_prompt(self, tokens: int) -> int:
        """Floating-point operations of its rows; the head's for the last one only."""
        pairs = tokens * (tokens + 1) // 2
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return 2 * self.weights * tokens + 2 * self.head + attention


def requests_of(
    count: int, tokens: int, new: int, vocabulary: int, seed: int
) -> list[GenerateRequest]:
    draw = random.Random(seed)
    sampling = Sampling(max_tokens=new, temperature=0.0)
    return [
        GenerateRequest(n, tuple(draw.choices(range(4, vocabulary), k=tokens)), sampling)
        for n in range(count)
    ]


def step(engine: Engine) -> int:
    """One step; how many results it had. Raises where one is a failure."""
    results = engine.step()
    for result in results:
        if isinstance(result, Failure):
            raise TypeError(result)
    return len(results)


def decode(engine: Engine, requests: list[GenerateRequest], device: str) -> tuple[int, int, float]:
    """Steps that made one token of every sequence, and no more; tokens they made; seconds.

    Measured between the last prompt and the first end, whatever a step does for itself included.
    """
    engine.submit(requests)
    finished = 0
    while engine.counters.decode_tokens == 0 and not finished:  # prompts, and the first tokens
        finished += step(engine)
    while not finished:
        before = engine.counters
        finished += step(engine)
        if engine.counters.decode_tokens - before.decode_tokens == len(requests):
            break
    steps, tokens, taken = 0, 0, 0.0
    while not finished:
        before = engine.counters
        settle(device)
        begun = time.perf_counter()
        finished += step(engine)
        settle(device)
        if engine.counters.decode_tokens - before.decode_tokens == len(requests):
            steps += 1
            tokens += len(requests)
            taken += time.perf_counter() - begun
    while engine.pending:
        step(engine)
    return steps, tokens, taken


def prefill(engine: Engine, requests: list[GenerateRequest], device: str) -> float:
    """Seconds to compute all, one token of answer each."""
    settle(device)
    begun = time.perf_counter()
    engine.submit(requests)
    while engine.pending:
        step(engine)
    settle(device)
    return time.perf_counter() - begun


def measure(device: str, trial: Trial, folder: Path, *, graphs: bool) -> dict[str, Any]:
    """Everything, printed as it comes."""
    config = transformers.AutoConfig.from_pretrained(folder)
    costs = Costs.of(config, trial.dtype)
    begun = time.perf_counter()
    engine = Engine(
        EngineConfig(
            model=folder,
            kind=Kind.GENERATE,
            device=device,
            dtype=trial.dtype,
            context_length=trial.long + trial.prompt + trial.steps,
            prefill_tokens=trial.step_tokens,
            max_sequences=max(trial.sequences),
            guess_rows=0,  # a step is to make one token of each
            cuda_graphs=graphs,
        )
    )
    report: dict[str, Any] = {"path": engine.status.path, "load_s": time.perf_counter() - begun}
    copies = copy_rate(trial.copied_bytes, device)
    square = torch.randn(2, trial.product, trial.product, device=device)
    square = square.to(getattr(torch, trial.dtype))
    peak = 2 * trial.product**3 / seconds_of(lambda: square[0] @ square[1], device)
    report |= {"copy_gb_per_s": copies / 1e9, "product_tflop_per_s": peak / 1e12}
    decode(engine, requests_of(max(trial.sequences), trial.prompt, 4, config.vocab_size, 1), device)
    for count in trial.sequences:
        asked = requests_of(count, trial.prompt, trial.steps, config.vocab_size, 2 + count)
        steps, tokens, taken = decode(engine, asked, device)
        # Lengths grow evenly, so a step in the middle stands for all of them.
        moved = costs.bytes_of_step([trial.prompt + trial.steps // 2] * count) * steps / taken
        report[f"decode_{count}"] = {
            "steps": steps,
            "tokens_per_s": tokens / taken,
            "ms_per_step": 1e3 * taken / steps,
            "gb_per_s_at_least": moved / 1e9,
            "share_of_copy": moved / copies,
        }
        print(f"decode_{count}", report[f"decode_{count}"])
    first, second = (report[f"decode_{n}"]["tokens_per_s"] for n in trial.sequences[:2])
    report["ratio"] = {"sequences": trial.sequences[1], "to_single": second / first}
    prefill(engine, requests_of(8, trial.long, 1, config.vocab_size, 5), device)
    asked = requests_of(trial.prompts, trial.long, 1, config.vocab_size, 6)
    taken = prefill(engine, asked, device)
    rate = costs.operations_of_prompt(trial.long) * trial.prompts / taken
    report["prefill"] = {
        "tokens_per_s": trial.long * trial.prompts / taken,
        "tflop_per_s": rate / 1e12,
        "share_of_product": rate / peak,
    }
    if device == "cuda":
        report["memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return report


def _measured(trial: Trial, chosen: argparse.Namespace) -> dict[str, Any]:
    auto = transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        made = save(
            trial.made, Path(folder), chosen.device, dtype=trial.dtype, auto=auto, endless=True
        )
        return measure(chosen.device, trial, made, graphs=chosen.graphs)


def main(arguments: list[str] | None = None) -> None:
    tell(arguments, TRIALS, _measured, __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
