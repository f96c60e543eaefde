"""Does Prometheus read what the service says of itself?"""

from dataclasses import fields
from datetime import UTC, datetime, timedelta

from prometheus_client.parser import text_string_to_metric_families

from service.batch import BatchStatus, LineState
from service.db.counts import Queue
from service.db.workers import Figures, LiveWorker
from service.metrics import COUNTERS, GAUGES, SUMMARIES, Known, exposition

AT = datetime(2026, 5, 1, tzinfo=UTC)

FIGURES = Figures(
    path="packed",
    same_bytes=True,
    token_budget=4096,
    memory_bytes=7,
    requests=12,
    failures=21,
    input_tokens=100,
    output_tokens=25,
    computed_tokens=90,
    padding_tokens=9,
    steps=23,
    rows=10,
    twins=4,
    out_of_memory=24,
    non_finite=6,
    queue_depth=8,
    open_shards=22,
    busy_s=1.5,
    idle_s=0.25,
    tokens_per_s=70.5,
    lines=11,
    lines_s=1.25,
    line_p50_s=0.1,
    line_p95_s=0.2,
    prefill_tokens=31,
    decode_tokens=32,
    cached_tokens=33,
    preempted=34,
    guessed_tokens=45,
    guessed_right=46,
    running=35,
    seats=36,
    kv_held=37,
    kv_tokens=38,
    firsts=39,
    firsts_s=41.5,
    first_p50_s=0.41,
    first_p95_s=0.42,
    laters=43,
    laters_s=44.5,
    later_p50_s=0.043,
    later_p95_s=0.044,
)


def known(figures: Figures = FIGURES, model: str = "m", worker: str = "a-1") -> Known:
    return Known(
        workers=[LiveWorker(worker, AT, AT + timedelta(seconds=9), {model: figures})],
        batches={BatchStatus.IN_PROGRESS: 2, BatchStatus.COMPLETED: 5},
        lines={LineState.PENDING: 40, LineState.FAILED: 1},
        queues={"m": Queue(runnable=3, running=1, age_s=12.5)},
    )


def samples(known: Known) -> dict[tuple[str, ...], float]:
    """Each sample as Prometheus's own parser reads it, by its name and the values of its labels, in
    the order of the labels' names: model, quantile, worker."""
    text = exposition(known).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_worker_did_is_told_by_worker_and_model() -> None:
    found = samples(known())
    of = ("m", "a-1")
    assert found["halfrate_engine_info", "m", "packed", "true", "a-1"] == 1
    assert found["halfrate_engine_computed_tokens_total", *of] == 90
    assert found["halfrate_engine_padding_tokens_total", *of] == 9
    assert found["halfrate_engine_idle_seconds_total", *of] == 0.25
    assert found["halfrate_engine_queue_depth", *of] == 8
    assert found["halfrate_engine_tokens_per_second", *of] == 70.5
    assert found["halfrate_line_seconds", "m", "0.95", "a-1"] == 0.2
    assert found["halfrate_line_seconds_count", *of] == 11
    assert found["halfrate_time_to_first_token_seconds", "m", "0.5", "a-1"] == 0.41
    assert found["halfrate_time_per_output_token_seconds_count", *of] == 43
    assert found["halfrate_engine_running_rows_total", *of] == 35
    assert found["halfrate_engine_possible_rows_total", *of] == 36
    assert found["halfrate_engine_prefix_hit_tokens_total", *of] == 33
    assert found["halfrate_line_seconds_sum", *of] == 1.25
    assert found["halfrate_worker_heartbeat_timestamp_seconds", "a-1"] == AT.timestamp() + 9


def test_every_figure_is_told() -> None:
    # Each has another value here, so none can stand in for another.
    told = set(samples(known()).values())
    for field in fields(Figures):
        value = getattr(FIGURES, field.name)
        if field.name not in ("path", "same_bytes"):  # labels
            assert value in told, field.name


def test_what_there_is_to_do_is_told() -> None:
    found = samples(known())
    assert found["halfrate_batches", "in_progress"] == 2
    assert found["halfrate_lines", "pending"] == 40
    assert found["halfrate_shards", "m", "runnable"] == 3
    assert found["halfrate_shards", "m", "running"] == 1
    assert found["halfrate_queue_age_seconds", "m"] == 12.5


def test_what_is_unknown_is_left_out() -> None:
    found = samples(known(Figures()))
    assert ("halfrate_engine_memory_bytes", "m", "a-1") not in found
    assert ("halfrate_engine_tokens_per_second", "m", "a-1") not in found
    assert not [name for name in found if name[0] == "halfrate_line_seconds"]
    assert found["halfrate_line_seconds_count", "m", "a-1"] == 0


def test_names_that_need_it_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    assert samples(known(model=odd, worker=odd))["halfrate_engine_steps_total", odd, odd] == 23


def test_every_metric_has_a_help_text_and_a_name_of_ours() -> None:
    families = list(text_string_to_metric_families(exposition(known()).decode()))
    assert len(families) == len(COUNTERS) + len(GAUGES) + len(SUMMARIES) + 7
    for family in families:
        assert family.name.startswith("halfrate_")
        assert family.documentation
