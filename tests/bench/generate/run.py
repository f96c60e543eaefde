"""How fast does the engine generate on this machine, beside what people use today?

    make bench-generate     or:  python -m tests.bench.generate.run [--only NAME …] [--file NAME …]

Each runs both files once, one after the other, on the same threads. Loading is not counted, nor is
a first run of the same shape with other tokens, in which the system gives memory to whoever keeps
some for keys and values. Seconds are those of the clock, and beside them those of the processor,
which a noisy machine changes less.
The share of GEMM is what the model's products alone would take at the rows of each step, over
prepacked weights, of what the run took. The last line is JSON.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.model.linear import PrepackedLinear
from engine.request import GenerateRequest, Generation
from engine.tokenizer import Tokenizer
from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from tests.bench.encode.gemm import Layers
from tests.bench.generate.files import generation, tagging
from tests.bench.generate.occupancy import draw
from worker.models import pull

MODEL = "smollm2-135m-instruct"
FILES = {"tagging": tagging, "generation": generation}
HERE = Path(__file__).parent
PEERS = {
    "OpenVINO GenAI": (Path(".venv-openvino/bin/python"), "peer_openvino.py", []),
    "vLLM": (Path(".venv-vllm/bin/python"), "peer_vllm.py", ["MODEL"]),
    "transformers, batch 16": (Path(sys.executable), "peer_static.py", ["MODEL", "16"]),
    "transformers, batch 32": (Path(sys.executable), "peer_static.py", ["MODEL", "32"]),
    "transformers, batch 64": (Path(sys.executable), "peer_static.py", ["MODEL", "64"]),
}
# vLLM: GB of keys and values; one process, so that its CPU time can be read.
SETTINGS = ("VLLM_CPU_KVCACHE_SPACE=3", "VLLM_ENABLE_V1_MULTIPROCESSING=0")
VOCABULARY = 49152
ALONE = 12  # lines of the run with one sequence at a time, which would take long
GRID = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024)  # rows at which products are measured


@dataclasses.dataclass
class Run:
    """What one contender did with one file."""

    seconds: float
    cpu: float
    prompt_tokens: int
    answers: list[list[int]]
    version: str = ""
    steps: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    # of each step: tokens, answers that got one, sequences that ran
    seats: float = 0.0  # share that was taken while lines waited
    first: float = 0.0  # seconds to an answer's first token, mean

    @property
    def made(self) -> int:
        """Output tokens."""
        return sum(map(len, self.answers))


def ours(config: EngineConfig, requests: list[GenerateRequest]) -> Run:
    """This engine."""
    engine = Engine(config)
    assert engine.status.path == "packed"
    list(engine.run(first(requests)))
    begun, cpu = time.perf_counter(), time.process_time()
    engine.submit(requests)
    found: dict[Any, Generation] = {}
    steps = []
    while engine.pending:
        before = engine.counters
        for result in engine.step():
            assert isinstance(result, Generation)
            found[result.id] = result
        after = engine.counters
        tokens = after.padded_tokens - before.padded_tokens
        decoded = after.decode_tokens - before.decode_tokens
        steps.append((tokens, decoded, after.running - before.running))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    answers = [list(found[request.id].token_ids) for request in requests]
    prompt = sum(len(request.prompt) for request in requests)
    return Run(seconds, cpu, prompt, answers, torch.__version__, steps)


def first(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """What runs before: as long as these, as much alike, and with nothing in common with them."""
    return [
        dataclasses.replace(
            request, prompt=tuple((token + 1) % VOCABULARY for token in request.prompt)
        )
        for request in requests
    ]


def peer(name: str, folder: Path, requests: list[GenerateRequest], eos_id: int | None) -> Run:
    """Somebody else, in an environment of its own."""
    python, program, arguments = PEERS[name]
    told = {
        key: [
            {"prompt": r.prompt, "max_tokens": r.sampling.max_tokens, "eos_id": eos_id}
            for r in some
        ]
        for key, some in (("first", first(requests)), ("lines", requests))
    }
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "lines.json"
        listed.write_text(json.dumps(told), encoding="utf-8")
        more = [str(folder) if argument == "MODEL" else argument for argument in arguments]
        command = [str(python), str(HERE / program), str(listed), str(torch.get_num_threads())]
        output = subprocess.run(
            ["env", *SETTINGS, *command, *more], capture_output=True, text=True, check=False
        )
    if output.returncode:
        raise SystemExit(f"{name} failed:\n{output.stderr[-3000:]}")
    found = json.loads(output.stdout.splitlines()[-1])
    prompt = sum(len(request.prompt) for request in requests)
    return Run(found["seconds"], found["cpu"], prompt, found["answers"], found["version"])


class Products:
    """How long the model's products take alone, at any number of rows."""

    def __init__(self, folder: Path) -> None:
        self._layers = Layers.of(folder)
        config = AutoConfig.from_pretrained(folder)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._head = Layers([head], [PrepackedLinear(head)], config.hidden_size, 1)
        self._known: dict[tuple[str, int], float] = {}

    def seconds(self, steps: list[tuple[int, int, int]]) -> float:
        """Of the layers at each step's rows, and of the head for each answer's next token."""
        rows = Counter(tokens for tokens, _, _ in steps if tokens)
        sampled = Counter(decoded for _, decoded, _ in steps if decoded)
        return sum(self._time("layers", n) * count for n, count in rows.items()) + sum(
            self._time("head", n) * count for n, count in sampled.items()
        )

    def _time(self, part: str, rows: int) -> float:
        """Seconds a pass, between measured row counts by a straight line."""
        below = max((n for n in GRID if n <= rows), default=GRID[0])
        above = min((n for n in GRID if n >= rows), default=GRID[-1])
        low, high = self._measured(part, below), self._measured(part, above)
        return low if below == above else low + (high - low) * (rows - below) / (above - below)

    def _measured(self, part: str, rows: int) -> float:
        if (part, rows) not in self._known:
            layers = self._layers if part == "layers" else self._head
            rate = layers.rate(layers.prepacked, rows)
            self._known[part, rows] = rows * layers.flops_a_token / rate
        return self._known[part, rows]


def alone(config: EngineConfig, requests: list[GenerateRequest]) -> Run:
    """This engine with one sequence at a time, a part of the file."""
    part = requests[:: len(requests) // ALONE][:ALONE]
    return ours(dataclasses.replace(config, max_sequences=1), part)


def bench(folder: Path, name: str, only: set[str]) -> dict[str, Any]:
    """All contenders on one file; prints as they finish."""
    tokenizer = Tokenizer.from_dir(folder)
    requests = FILES[name](tokenizer)
    config = EngineConfig(model=folder, kind=Kind.GENERATE)
    runs: dict[str, Run] = {}

    def wanted(contender: str) -> bool:
        return not only or contender in only

    def note(contender: str, run: Run) -> None:
        runs[contender] = run
        print(
            f"{name:11}{contender:26}{run.seconds:8.1f} s{run.cpu:8.1f} s of CPU"
            f"{(run.prompt_tokens + run.made) / run.seconds:9.0f} tokens/s"
            f"{run.made / run.seconds:8.0f} output tokens/s",
            flush=True,
        )

    note("halfrate", ours(config, requests))
    if wanted("int8"):
        rounded = dataclasses.replace(config, quantize=Quantize.INT8)
        note("halfrate, int8", ours(rounded, requests))
    if wanted("deterministic"):
        same = dataclasses.replace(config, deterministic=True)
        note("halfrate, deterministic", ours(same, requests))
    if wanted("alone"):
        note("halfrate, one at a time", alone(config, requests))
    for contender, (python, _, _) in PEERS.items():
        if wanted(contender):
            if python.exists():
                note(contender, peer(contender, folder, requests, tokenizer.eos_id))
            else:
                print(f"{name:11}{contender:26} is not installed: {python}")
    base = runs["halfrate"]
    products = Products(folder).seconds(base.steps)
    found = {
        "lines": len(requests),
        "prompt_tokens": base.prompt_tokens,
        "output_tokens": base.made,
        "steps": len(base.steps),
        "products_seconds": round(products, 2),
        "share_of_gemm": round(products / base.seconds, 3),
        "seconds": {key: round(run.seconds, 2) for key, run in runs.items()},
        "cpu_seconds": {key: round(run.cpu, 2) for key, run in runs.items()},
        "faster_than": {
            key: round(_rate(base) / _rate(run), 2) for key, run in runs.items() if run is not base
        },
        "same_answers": {
            key: sum(map(list.__eq__, base.answers, run.answers))
            for key, run in runs.items()
            if len(run.answers) == len(base.answers) and run is not base
        },
        "versions": {key: run.version for key, run in runs.items()},
    }
    for line in _table(name, found):
        print(line)
    return found


def _rate(run: Run) -> float:
    """Tokens of prompts and answers a second."""
    return (run.prompt_tokens + run.made) / run.seconds


def _table(name: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {found['lines']} lines, {found['steps']} steps"
    yield f"  products alone {found['products_seconds']} s, {found['share_of_gemm']:.0%} of the run"
    for key, ratio in found["faster_than"].items():
        same = found["same_answers"].get(key)
        yield f"  {ratio:5.2f}× {key}" + ("" if same is None else f", {same} answers the same")


def main() -> None:
    """Run all of them, draw the picture, print a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Files().models, help="model cache")
    parser.add_argument("--file", nargs="*", choices=list(FILES), default=list(FILES))
    parser.add_argument(
        "--only", nargs="*", default=[], help="beside ours: int8, deterministic, alone, a peer"
    )
    parser.add_argument("--draw", type=Path, help="where the picture of occupancy goes (.svg)")
    chosen = parser.parse_args()
    model = Catalog.load(DEFAULT_CATALOG).get(MODEL)
    assert model is not None
    folder = pull(model, chosen.models)
    if chosen.draw is not None:
        requests = generation(Tokenizer.from_dir(folder))
        config = EngineConfig(model=folder, kind=Kind.GENERATE, max_sequences=32)
        draw(chosen.draw, requests, ours(config, requests), seats=32)
    found = {name: bench(folder, name, set(chosen.only)) for name in chosen.file}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    print(json.dumps({**machine, **found}))


if __name__ == "__main__":
    main()
