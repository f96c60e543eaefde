"""Does an engine stay as fast and as small, however much waits and however much it has answered?

    python -m tests.bench.steady [--most 1000000] [--lines 20000]

Prints what planning a step takes and what one waiting line holds, at 100, 10,000 … waiting lines;
then the resident memory of a process whose engine, a tiny decoder, answers so many lines, at each
quarter of them. The last line is JSON.
"""

import argparse
import gc
import json
import resource
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.plan.schedule import Asked, Schedule
from engine.plan.slots import Slots
from engine.request import GenerateRequest, Sampling
from tests.unit.engine.conftest import DECODERS, write_tokenizer

STEPS = 400
PAGE = resource.getpagesize()


def planning(waiting: int) -> dict[str, float]:
    """Microseconds to plan a step, the median and the 99th percentile, and bytes a waiting line."""
    schedule = Schedule(Slots(32768), limit=32768, max_rows=64)
    head = tuple(range(200))
    asked = [Asked(n, (*head, n % 251, n // 251, 7), 20) for n in range(waiting)]
    gc.collect()
    tracemalloc.start()
    schedule.add(asked)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.freeze()  # the collector's own passes are not planning
    taken = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step = schedule.plan(256)
        if not step.pieces:
            break
        schedule.done(step)
        for piece in step.pieces:
            if piece.samples and len(piece.strand.made) == 19:
                schedule.finish(piece.strand)
            elif piece.samples:
                schedule.append(piece.strand, 1)
        taken.append(time.perf_counter() - begun)
    gc.unfreeze()
    taken.sort()
    return {
        "waiting": waiting,
        "plan_us_p50": round(taken[len(taken) // 2] * 1e6),
        "plan_us_p99": round(taken[len(taken) * 99 // 100] * 1e6),
        "bytes_a_line": round(held / waiting),
    }


def resident() -> int:
    """MiB that this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE >> 20


def resident_at_quarters(lines: int) -> list[int]:
    """MiB after the first hundred lines, and after each quarter of them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(DECODERS["llama"]())
        model.save_pretrained(folder)
        write_tokenizer(folder, ends=False)
        engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE))
    assert engine.status.path == "packed"
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    head = tuple(3 + n % 200 for n in range(40))
    measured = []
    for begin, end in [(0, 100), *((lines * q // 4, lines * (q + 1) // 4) for q in range(4))]:
        for shard in range(begin, end, 500):
            numbers = range(shard, min(end, shard + 500))
            engine.submit(
                GenerateRequest(n, (*head, 3 + n % 250, 3 + n // 250 % 250), sampling)
                for n in numbers
            )
            while engine.pending:
                engine.step()
        gc.collect()
        measured.append(resident())
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1_000_000, help="most lines that wait")
    parser.add_argument("--lines", type=int, default=20_000, help="lines that are answered")
    chosen = parser.parse_args()
    report: dict[str, object] = {}
    resident_mib = resident_at_quarters(chosen.lines)
    print(f"resident after 100 lines and each quarter of {chosen.lines}: {resident_mib} MiB")
    plans = [planning(n) for n in (100, 10_000, 1_000_000) if n <= chosen.most]
    for plan in plans:
        print(plan)
    report = {"resident_mib": resident_mib, "lines": chosen.lines, "plans": plans}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
