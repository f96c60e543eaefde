"""How fast does one device encode, and what keeps it from being faster?

    python tests/gpu/encode_speed.py [--device cpu --shape tiny] [--graphs]

Random weights, ragged random texts, so nothing needs to be fetched. Prints what it measured, the
last line as JSON. Needs the repository's root on PYTHONPATH.
"""

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.request import Embedding, EncodeRequest
from tests.gpu.models import BERT_LARGE, MINILM, TINY, Made, save
from tests.gpu.telling import tell


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: a model, three token budgets, and how many tokens each is tried on."""

    made: Made
    dtype: str
    budgets: tuple[int, int, int]
    longest: int
    probe_tokens: int
    tokens: int
    copied_bytes: int
    graphs: bool = False


TRIALS = {
    "bert-large": Trial(
        BERT_LARGE, "bfloat16", (16384, 32768, 65536), 512, 500_000, 2_000_000, 2 << 30
    ),
    "minilm": Trial(MINILM, "bfloat16", (16384, 32768, 65536), 256, 2_000_000, 4_000_000, 2 << 30),
    "tiny": Trial(TINY["bert"], "float32", (256, 512, 1024), 128, 2_000, 6_000, 1 << 20),
}


@dataclass(frozen=True, slots=True)
class Layers:
    """What one token and one step of a BERT cost at least."""

    count: int
    width: int
    inner: int
    bytes_per_number: int

    @classmethod
    def of(cls, config: Any, dtype: str) -> "Layers":
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            getattr(torch, dtype).itemsize,
        )

    @property
    def products(self) -> dict[tuple[int, int], int]:
        """(numbers in, numbers out) of a layer's products with weights, and how many there are."""
        return {
            (self.width, self.width): 4,
            (self.width, self.inner): 1,
            (self.inner, self.width): 1,
        }

    def operations(self, lengths: list[int]) -> int:
        """Floating-point operations: products with weights, and attention of real tokens."""
        weights = sum(many * into * out for (into, out), many in self.products.items())
        squares = sum(length * length for length in lengths)
        return self.count * (2 * weights * sum(lengths) + 4 * self.width * squares)

    def bytes_moved(self, tokens: int, steps: int) -> int:
        """Least traffic of the products: weights once a step, each input and output once."""
        moved = sum(
            many * (into * out * steps + (into + out) * tokens)
            for (into, out), many in self.products.items()
        )
        return self.count * moved * self.bytes_per_number


def texts_of(tokens: int, longest: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Texts of 8 tokens to `longest`, most of them short, `tokens` or a few more in all."""
    draw = random.Random(11)
    texts, left = [], tokens
    while left > 0:
        length = min(longest, max(8, round(draw.lognormvariate(4.7, 0.8))))
        texts.append(tuple(draw.choices(range(4, vocabulary), k=length)))
        left -= length
    return texts


def seconds_of(work: Callable[[], Any], device: str, *, rounds: int = 10) -> float:
    """Median seconds of one call, after three that do not count."""
    taken = []
    for turn in range(rounds + 3):
        settle(device)
        begun = time.perf_counter()
        work()
        settle(device)
        if turn >= 3:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def settle(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def product_rate(layers: Layers, rows: int, device: str, dtype: str) -> float:
    """Operations a second of a layer's products alone, at so many rows, on random numbers."""
    taken, done = 0.0, 0
    for (into, out), many in layers.products.items():
        rows_in = torch.randn(rows, into, device=device, dtype=getattr(torch, dtype))
        weight = torch.randn(out, into, device=device, dtype=getattr(torch, dtype))
        bias = torch.randn(out, device=device, dtype=getattr(torch, dtype))

        def product(x: Any = rows_in, w: Any = weight, b: Any = bias) -> Any:
            return torch.nn.functional.linear(x, w, b)

        taken += many * seconds_of(product, device)
        done += many * 2 * rows * into * out
    return done / taken


def copy_rate(size: int, device: str) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def engine_of(folder: Path, trial: Trial, device: str, budget: int) -> Engine:
    return Engine(
        EngineConfig(
            model=folder,
            kind=Kind.EMBED,
            device=device,
            dtype=trial.dtype,
            context_length=trial.longest,
            token_budget=budget,
            max_rows=budget // 8,
            pooling="mean",
            cuda_graphs=trial.graphs,
        )
    )


def encode(engine: Engine, texts: list[tuple[int, ...]], device: str) -> float:
    """Seconds to encode all; raises where one has no vector, or one that is not finite."""
    settle(device)
    begun = time.perf_counter()
    results = dict(engine.run(EncodeRequest(n, text) for n, text in enumerate(texts)))
    taken = time.perf_counter() - begun
    for n in range(len(texts)):
        result = results[n]
        if not isinstance(result, Embedding):
            raise TypeError(result)
    return taken


def probe(
    folder: Path, trial: Trial, device: str, texts: list[tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Tokens a second and memory at most, at each budget."""
    points = []
    for budget in trial.budgets:
        engine = engine_of(folder, trial, device, budget)
        encode(engine, texts[: len(texts) // 4], device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # Other tokens: what was encoded a moment ago might be remembered.
        fresh = [(*text[:-1], 4 + (text[-1] + 1) % 100) for text in texts]
        taken = encode(engine, fresh, device)
        held = torch.cuda.max_memory_allocated() if device == "cuda" else None
        points.append(
            {
                "budget": budget,
                "tokens_per_s": round(sum(map(len, texts)) / taken),
                "memory_mib": None if held is None else round(held / 2**20),
            }
        )
        print("budget", points[-1])
    return points


def idle_share(engine: Engine, texts: list[tuple[int, ...]], device: str) -> float | None:
    """How much of the time the device did nothing; at most, since profiling slows the host."""
    if device != "cuda":
        encode(engine, texts, device)
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        taken = encode(engine, texts, device)
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    return round(1 - busy / taken, 3)


def measure(device: str, trial: Trial, folder: Path) -> dict[str, Any]:
    """Everything, printed as it comes."""
    config = transformers.AutoConfig.from_pretrained(folder)
    layers = Layers.of(config, trial.dtype)
    points = probe(
        folder, trial, device, texts_of(trial.probe_tokens, trial.longest, config.vocab_size)
    )
    best = max(points, key=lambda point: point["tokens_per_s"])["budget"]
    texts = texts_of(trial.tokens, trial.longest, config.vocab_size)
    lengths = [len(text) for text in texts]
    engine = engine_of(folder, trial, device, best)
    encode(engine, texts_of(trial.probe_tokens, trial.longest, 50), device)
    before = engine.counters
    taken = encode(engine, texts, device)
    steps = engine.counters.steps - before.steps
    computed = engine.counters.padded_tokens - before.padded_tokens
    products = product_rate(layers, best, device, trial.dtype)
    copies = copy_rate(trial.copied_bytes, device)
    rate = layers.operations(lengths) / taken
    traffic = layers.bytes_moved(computed, steps) / taken
    return {
        "texts": len(texts),
        "tokens": sum(lengths),
        "padding": round(1 - sum(lengths) / computed, 4),
        "budgets": points,
        "budget": best,
        "steps": steps,
        "path": engine.status.path,
        "same_bytes": engine.status.same_bytes,
        "tokens_per_s": round(sum(lengths) / taken),
        "tflop_per_s": round(rate / 1e12, 3),
        "gemm_tflop_per_s": round(products / 1e12, 3),
        "share_of_gemm": round(rate / products, 3),
        "gb_per_s_at_least": round(traffic / 1e9, 1),
        "copy_gb_per_s": round(copies / 1e9, 1),
        "share_of_copy": round(traffic / copies, 3),
        "idle_share_at_most": idle_share(
            engine, texts_of(trial.probe_tokens, trial.longest, 60), device
        ),
    }


def _measured(trial: Trial, chosen: argparse.Namespace) -> dict[str, Any]:
    graphed = dataclasses.replace(trial, graphs=chosen.graphs)
    with tempfile.TemporaryDirectory() as folder:
        made = save(trial.made, Path(folder), chosen.device, dtype=trial.dtype)
        return measure(chosen.device, graphed, made)


def main(arguments: list[str] | None = None) -> None:
    tell(arguments, TRIALS, _measured, __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
