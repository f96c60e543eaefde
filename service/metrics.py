"""What does `GET /metrics` say? Pure functions from what is known to Prometheus's metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from service.batch import BatchStatus, LineState
from service.db.counts import Queue
from service.db.workers import Figures, LiveWorker

PREFIX = "halfrate"

COUNTERS: Sequence[tuple[str, str, Callable[[Figures], float]]] = (
    ("requests", "Sequences that were answered.", lambda f: f.requests),
    ("failures", "Of these, those answered with a failure.", lambda f: f.failures),
    ("input_tokens", "Tokens of the answered sequences.", lambda f: f.input_tokens),
    ("output_tokens", "Tokens that were generated.", lambda f: f.output_tokens),
    ("computed_tokens", "Tokens that went through the model.", lambda f: f.computed_tokens),
    ("padding_tokens", "Of these, padding and repeated work.", lambda f: f.padding_tokens),
    (
        "prefill_tokens",
        "Of these, of prompts and of answers computed again.",
        lambda f: f.prefill_tokens,
    ),
    ("decode_tokens", "Of these, of answers, for the token after.", lambda f: f.decode_tokens),
    (
        "prefix_hit_tokens",
        "Tokens of prompts that had been computed for others.",
        lambda f: f.cached_tokens,
    ),
    ("preemptions", "Answers that had to wait in the middle for memory.", lambda f: f.preempted),
    ("guessed_tokens", "Of the decode tokens, guesses.", lambda f: f.guessed_tokens),
    ("guessed_right", "Guesses that came true.", lambda f: f.guessed_right),
    ("running_rows", "Sequences running, step by step, while there was more.", lambda f: f.running),
    ("possible_rows", "How many could have run in these steps.", lambda f: f.seats),
    ("steps", "Steps of the engine.", lambda f: f.steps),
    ("rows", "Sequences in these steps.", lambda f: f.rows),
    ("twins", "Sequences answered by what another had computed.", lambda f: f.twins),
    ("out_of_memory", "Steps that were cut smaller.", lambda f: f.out_of_memory),
    ("non_finite", "Sequences run again in float32.", lambda f: f.non_finite),
    ("busy_seconds", "Time of the steps.", lambda f: f.busy_s),
    (
        "idle_seconds",
        "Time without anything to do although shards were open.",
        lambda f: f.idle_s,
    ),
)
"""Of each worker's engines, since the worker started."""

GAUGES: Sequence[tuple[str, str, Callable[[Figures], float | None]]] = (
    ("queue_depth", "Sequences handed in and not answered.", lambda f: f.queue_depth),
    ("open_shards", "Shards that are being run.", lambda f: f.open_shards),
    ("tokens_per_second", "Speed while busy, as last measured.", lambda f: f.tokens_per_s),
    ("kv_tokens", "Tokens of the KV memory in use.", lambda f: f.kv_held),
    ("kv_limit_tokens", "Tokens that the KV memory may hold.", lambda f: f.kv_tokens),
    ("token_budget", "Most tokens of a step.", lambda f: f.token_budget),
    ("memory_bytes", "Most that the device has held for it.", lambda f: f.memory_bytes),
)
"""Of each worker's engines, at its last heartbeat; left out where unknown."""


SUMMARIES: Sequence[tuple[str, str, Callable[[Figures], "_Summary"]]] = (
    (
        "line_seconds",
        "A line's share of the engine's time.",
        lambda f: _Summary(f.lines, f.lines_s, f.line_p50_s, f.line_p95_s),
    ),
    (
        "time_to_first_token_seconds",
        "From when an answer's prompt was begun to its first token.",
        lambda f: _Summary(f.firsts, f.firsts_s, f.first_p50_s, f.first_p95_s),
    ),
    (
        "time_per_output_token_seconds",
        "An answer's time for each token after its first.",
        lambda f: _Summary(f.laters, f.laters_s, f.later_p50_s, f.later_p95_s),
    ),
)
"""Number and sum of all, percentiles of the last."""


@dataclass(frozen=True, slots=True)
class _Summary:
    count: int
    sum_s: float
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class Known:
    """The whole service at one moment."""

    workers: Sequence[LiveWorker]
    batches: Mapping[BatchStatus, int]
    lines: Mapping[LineState, int]
    queues: Mapping[str, Queue]


@dataclass(frozen=True, slots=True)
class _Collector(Collector):
    known: Known

    def collect(self) -> Iterable[Metric]:
        """Every metric, each with all its samples."""
        yield from _of_the_service(self.known)
        yield from _of_workers(self.known.workers)


def exposition(known: Known) -> bytes:
    """Prometheus's text format, version 0.0.4."""
    return generate_latest(_Collector(known))


def _of_the_service(known: Known) -> Iterator[Metric]:
    batches = GaugeMetricFamily(f"{PREFIX}_batches", "Batches by status.", labels=["status"])
    for status, number in known.batches.items():
        batches.add_metric([status], number)
    yield batches
    lines = GaugeMetricFamily(
        f"{PREFIX}_lines", "Lines of unfinished batches, by what became of them.", labels=["state"]
    )
    for state, number in known.lines.items():
        lines.add_metric([state], number)
    yield lines
    shards = GaugeMetricFamily(
        f"{PREFIX}_shards", "Shards that could be claimed, and that are.", labels=["model", "state"]
    )
    age = GaugeMetricFamily(
        f"{PREFIX}_queue_age_seconds",
        "For how long the longest-waiting shard has been ready.",
        labels=["model"],
    )
    for model, queue in sorted(known.queues.items()):
        shards.add_metric([model, "runnable"], queue.runnable)
        shards.add_metric([model, "running"], queue.running)
        age.add_metric([model], queue.age_s)
    yield from (shards, age)


def _of_workers(workers: Sequence[LiveWorker]) -> Iterator[Metric]:
    started = GaugeMetricFamily(
        f"{PREFIX}_worker_start_timestamp_seconds", "When the worker started.", labels=["worker"]
    )
    heard = GaugeMetricFamily(
        f"{PREFIX}_worker_heartbeat_timestamp_seconds",
        "When the worker was last heard of.",
        labels=["worker"],
    )
    for worker in workers:
        started.add_metric([worker.name], worker.started_at.timestamp())
        heard.add_metric([worker.name], worker.heartbeat_at.timestamp())
    yield from (started, heard)
    every = [
        ([worker.name, model], figures)
        for worker in workers
        for model, figures in sorted(worker.figures.items())
    ]
    yield from _of_engines(every)


def _of_engines(every: Sequence[tuple[list[str], Figures]]) -> Iterator[Metric]:
    labels = ["worker", "model"]
    status = GaugeMetricFamily(
        f"{PREFIX}_engine_info",
        "How the engine runs its model, as labels; always 1.",
        labels=[*labels, "path", "same_bytes"],
    )
    for names, figures in every:
        status.add_metric([*names, figures.path, str(figures.same_bytes).lower()], 1)
    yield status
    for name, help_text, value_of in COUNTERS:
        counter = CounterMetricFamily(f"{PREFIX}_engine_{name}", help_text, labels=labels)
        for names, figures in every:
            counter.add_metric(names, value_of(figures))
        yield counter
    for name, help_text, known_of in GAUGES:
        gauge = GaugeMetricFamily(f"{PREFIX}_engine_{name}", help_text, labels=labels)
        for names, figures in every:
            known = known_of(figures)
            if known is not None:
                gauge.add_metric(names, known)
        yield gauge
    for name, help_text, summary_of in SUMMARIES:
        seconds = SummaryMetricFamily(f"{PREFIX}_{name}", help_text, labels=labels)
        for names, figures in every:
            summary = summary_of(figures)
            # The library has no quantiles of its own.
            for quantile, value in (("0.5", summary.p50_s), ("0.95", summary.p95_s)):
                if value is not None:
                    shown = dict(zip(labels, names, strict=True)) | {"quantile": quantile}
                    seconds.add_sample(seconds.name, shown, value)
            seconds.add_metric(names, summary.count, summary.sum_s)
        yield seconds
