"""Are SmolLM2's seats taken from shard to shard, by a real worker that claims, reads and writes?

    python -m tests.bench.occupancy_of_shards [--lines 600]

Starts the embedded programs in a temporary folder, plans a file of short lines and drains its
shards in this process, as an engine worker does. The last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson

from service.catalog import DEFAULT_CATALOG
from service.clock import monotonic
from service.db.migrate import upgrade
from service.settings import Files, Settings
from service.stack.parts import embedded
from tests.integration.test_occupancy import Wakes
from tests.pipeline import Pipeline, chat_line
from worker.drain import Drain, Places
from worker.engine_loop import EngineLoop
from worker.engines import engine_of
from worker.execute import ModelOnLoop
from worker.lease import Keeper
from worker.resources import Resources, worker_name
from worker.settings import WorkerSettings
from worker.tokenizers import tokenizer_of

MODEL = "smollm2-135m-instruct"


def lines(count: int) -> list[bytes]:
    """Short questions, whose answers differ in length."""
    return [
        orjson.dumps({**line, "body": {**line["body"], "model": MODEL}})
        for n in range(count)
        for line in [
            orjson.loads(
                chat_line(f"{n}", f"Say {n} in words.", max_tokens=4 + 7 * n % 29, temperature=0)
            )
        ]
    ]


def drained(pipeline: Pipeline) -> dict[str, float]:
    """Run all shards; what the loop counted."""
    resources = pipeline.resources
    model = resources.catalog.get(MODEL)
    assert model is not None
    make = partial(engine_of, model, resources.settings.models, resources.worker_settings)
    wakes = Wakes()
    woken = replace(resources, waker=wakes)  # type: ignore[arg-type]  # a part of one
    loop = EngineLoop(make, clock=monotonic, name=MODEL)
    keeper = Keeper(
        resources.database, lease=resources.settings.lease, every_s=resources.settings.renew_s
    )
    on = ModelOnLoop(model, tokenizer_of(model, resources.settings.models), loop)
    with loop, keeper:
        wakes.drained = Drain(woken, on, keeper, Places(), stopping=lambda: False, clock=monotonic)
        begun = time.perf_counter()
        wakes.drain(MODEL)
        wakes.wait()
        seconds = time.perf_counter() - begun
        figures = loop.figures()
    return {
        "seconds": round(seconds, 1),
        "occupancy": round(figures.running / max(1, figures.seats), 3),
        "engine_idle_s": round(figures.idle_s, 2),
        "output_tokens": figures.output_tokens,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=600)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfrate-bench-") as name:
        folder = Path(name)
        with embedded(folder / "stack") as urls:
            upgrade(urls.database_url)
            settings = Settings(
                home=folder / "home",
                models=Files().models,
                catalog=DEFAULT_CATALOG,
                database_url=urls.database_url,
                redis_url=urls.redis_url,
                s3_endpoint_url=urls.s3_endpoint_url,
                s3_access_key_id=urls.s3_access_key_id,
                s3_secret_access_key=urls.s3_secret_access_key,
            )
            worker = worker_name(os.getpid())
            with closing(Resources.open(settings, WorkerSettings(), name=worker)) as resources:
                resources.storage.ensure_bucket()
                pipeline = Pipeline.with_project(resources)
                batch_id = pipeline.submit(lines(chosen.lines), "/v1/chat/completions")
                pipeline.validate()
                pipeline.plan()
                shards = len(pipeline.shards(batch_id))
                report = {"lines": chosen.lines, "shards": shards, **drained(pipeline)}
    print(
        f"{report['lines']} lines in {shards} shards: {report['occupancy']:.1%} of the seats taken "
        f"until the last was claimed, the engine idle for {report['engine_idle_s']} s"
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
