"""How fast does the engine embed on this machine, beside sentence-transformers?

    make bench-encode        or:  python -m tests.bench.encode.run [--texts N] [--rounds N]

All embed the same ragged texts, tokenising included, by turns: a round runs each once, and what is
printed are medians over the rounds, so that a noisy machine is fair to all. The rate of the model's
own linear layers alone is measured in the same rounds. The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.request import Embedding, EncodeRequest
from engine.surface import Counters
from engine.tokenizer import Tokenizer
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from tests.bench.encode.gemm import Layers
from tests.bench.encode.texts import docstrings
from worker.models import pull

MODEL = "all-minilm-l6-v2"
LONGEST = 256  # tokens; longer texts are left out, because both sides would cut them
BATCHES = (8, 16, 32, 64, 128)
DEFAULT_BATCH = 32
PEERS = Path(".venv-peers/bin/python")


class Contender:
    """This engine with one setting. An engine remembers texts, so each run has a new one."""

    def __init__(self, config: EngineConfig, texts: list[str]) -> None:
        self._config, self._texts = config, texts
        self._tokenizer = Tokenizer.from_dir(config.model)
        self.counters = Counters()
        self.path = ""
        self.vectors: NDArray[np.float32] = np.empty(0, np.float32)

    def run(self) -> float:
        """Embed all texts; the seconds that took, loading aside."""
        engine = Engine(self._config)
        self.path = engine.status.path
        found: dict[int, NDArray[np.float32]] = {}
        begun = time.perf_counter()
        ids = self._tokenizer.encode(self._texts)
        for index, result in engine.run(EncodeRequest(n, tuple(t)) for n, t in enumerate(ids)):
            assert isinstance(result, Embedding), result
            found[index] = result.vector
        seconds = time.perf_counter() - begun
        self.vectors = np.stack([found[index] for index in range(len(self._texts))])
        self.counters = engine.counters
        return seconds

    @property
    def padding(self) -> float:
        """Share of what it computed that was no text's token."""
        return 1 - self.counters.input_tokens / self.counters.padded_tokens

    @property
    def rows_a_step(self) -> int:
        """Tokens that go through the layers at once, on average."""
        return round(self.counters.padded_tokens / self.counters.steps)


@contextmanager
def peer(folder: Path, texts: list[str], vectors: Path) -> Iterator[Callable[[int], float]]:
    """sentence-transformers in an environment of its own: batch size in, seconds out."""
    listed = vectors.with_name("texts.json")
    listed.write_text(json.dumps(texts), encoding="utf-8")
    program = Path(__file__).with_name("peer.py")
    with subprocess.Popen(
        [str(PEERS), str(program), str(folder), str(listed), str(vectors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout
        json.loads(answers.readline())  # it has loaded

        def encode(batch_size: int) -> float:
            print(batch_size, file=asked, flush=True)
            return float(json.loads(answers.readline())["seconds"])

        yield encode
        asked.close()


def bench(folder: Path, texts: list[str], lengths: list[int], rounds: int) -> dict[str, Any]:
    """Everything that is printed."""
    config = EngineConfig(model=folder, kind=Kind.EMBED)
    int8 = EngineConfig(model=folder, kind=Kind.EMBED, quantize=Quantize.INT8)
    ours = {"fp32": Contender(config, texts), "int8": Contender(int8, texts)}
    layers = Layers.of(folder)
    tokens = sum(lengths)
    Contender(config, texts[:64]).run()  # all begin warm
    Contender(int8, texts[:64]).run()
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "vectors.npy"
        with peer(folder, texts, kept) as encode:
            for _ in range(rounds):
                for name, contender in ours.items():
                    speeds.setdefault(name, []).append(tokens / contender.run())
                rows = ours["fp32"].rows_a_step
                speeds.setdefault("gemm", []).append(layers.rate(layers.plain, rows))
                speeds.setdefault("prepacked", []).append(layers.rate(layers.prepacked, rows))
                for size in BATCHES:
                    speeds.setdefault(f"peer {size}", []).append(tokens / encode(size))
        theirs = np.load(kept)
    median = {name: statistics.median(values) for name, values in speeds.items()}
    with patch("engine.encode.probe._plug_in", return_value="the bench wants the fallback"):
        fallback = Contender(config, texts)
        fallback_speed = tokens / fallback.run()
    peers = {size: median[f"peer {size}"] for size in BATCHES}
    useful = median["fp32"] * layers.useful_flops(lengths) / tokens
    exact, rounded = ours["fp32"].vectors, ours["int8"].vectors
    cosines = (exact * rounded).sum(axis=1)
    return {
        "texts": len(texts),
        "tokens": tokens,
        "path": ours["fp32"].path,
        "int8_path": ours["int8"].path,
        "rows_a_step": ours["fp32"].rows_a_step,
        "tokens_per_s": {
            "fp32": round(median["fp32"]),
            "int8": round(median["int8"]),
            "fallback": round(fallback_speed),
            "sentence_transformers": {str(size): round(speed) for size, speed in peers.items()},
        },
        "to_peer_best": round(median["fp32"] / max(peers.values()), 2),
        "to_peer_default": round(median["fp32"] / peers[DEFAULT_BATCH], 2),
        "int8_to_fp32": round(median["int8"] / median["fp32"], 2),
        "useful_gflops": round(useful / 1e9, 1),
        "gemm_gflops": round(median["gemm"] / 1e9, 1),
        "prepacked_gemm_gflops": round(median["prepacked"] / 1e9, 1),
        "share_of_gemm": round(useful / median["gemm"], 3),
        "share_of_prepacked_gemm": round(useful / median["prepacked"], 3),
        "padding": round(ours["fp32"].padding, 4),
        "fallback_padding": round(fallback.padding, 4),
        "max_difference": float(np.abs(exact - theirs).max()),
        "int8_cosine_min": round(float(cosines.min()), 5),
        "int8_cosine_mean": round(float(cosines.mean()), 5),
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """What was measured, for people."""
    speeds = found["tokens_per_s"]
    base = speeds["fp32"]
    named = {
        f"halfrate, float32, {found['path']}": base,
        f"halfrate, int8, {found['int8_path']}": speeds["int8"],
        "halfrate, float32, fallback": speeds["fallback"],
        **{
            f"sentence-transformers, batch {size}": speed
            for size, speed in speeds["sentence_transformers"].items()
        },
    }
    yield f"{'':40}{'tokens/s':>10}{'float32 is':>12}"
    for name, speed in named.items():
        yield f"{name:40}{speed:>10,}{base / speed:>11.2f}×"
    for name, value in found.items():
        if name not in ("tokens_per_s", "path", "int8_path"):
            yield f"{name:40}{value:>10,}"


def main() -> None:
    """Run all of them and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Files().models, help="model cache")
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    model = Catalog.load(DEFAULT_CATALOG).get(MODEL)
    assert model is not None
    folder = pull(model, chosen.models)
    texts = docstrings(chosen.texts)
    encoded = Tokenizer.from_dir(folder).encode(texts)
    ragged = [
        (text, len(ids)) for text, ids in zip(texts, encoded, strict=True) if len(ids) <= LONGEST
    ]
    found = bench(
        folder, [text for text, _ in ragged], [length for _, length in ragged], chosen.rounds
    )
    for line in table(found):
        print(line)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    print(json.dumps({**machine, **versions, "rounds": chosen.rounds, **found}))


if __name__ == "__main__":
    main()
