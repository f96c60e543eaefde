"""Does an operator see what the engines do, and nobody else?"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr, ValidationError
from sqlalchemy import text

from engine.config import EngineConfig, Kind
from engine.request import Embedding, EncodeRequest, Request, Result, Work
from engine.stub import StubEngine
from service.db import session, workers
from service.db.workers import Figures
from service.settings import Settings
from service.view import batch_object
from service.wire import EngineWork
from tests import invariants
from tests.integration.api_server import Api, api_over
from tests.pipeline import Pipeline, embedding_line
from worker.engine_process import serving

TOKEN = "a token of the operator"


class Exact(StubEngine):
    """Four sequences a step, padded to the longest; a padded token takes 2⁻¹⁰ s. Twins are answered
    by the first of them."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(model=Path(), kind=Kind.EMBED), results_per_step=4)
        self._tokens: dict[object, tuple[int, ...]] = {}
        self._done: set[tuple[int, ...]] = set()

    def submit(self, requests: Iterable[Request]) -> None:
        arrived = [each for each in requests if isinstance(each, EncodeRequest)]
        self._tokens |= {each.id: each.tokens for each in arrived}
        super().submit(arrived)

    def step(self) -> list[Result]:
        results = [each for each in super().step() if isinstance(each, Embedding)]
        longest = max((each.input_tokens for each in results), default=0)
        return [
            self._with_work(each, Work(longest, longest / 1024, len(results))) for each in results
        ]

    def _with_work(self, result: Embedding, work: Work) -> Embedding:
        tokens = self._tokens[result.id]
        twin = tokens in self._done
        self._done.add(tokens)
        return replace(result, work=Work() if twin else work)


def shown(pipeline: Pipeline, batch_id: UUID) -> EngineWork | None:
    return batch_object(pipeline.batch(batch_id)).halfrate.engine


def test_a_batch_says_exactly_what_its_lines_cost_the_engine(pipeline: Pipeline) -> None:
    # The stub makes a token of a byte, and two of a text's ends.
    texts = ["x" * 6, "y" * 14, ["z" * 2, "w" * 14], "x" * 6, ""]
    batch_id = pipeline.submit([embedding_line(f"{n}", text) for n, text in enumerate(texts)])
    pipeline.validate()
    pipeline.plan()
    assert shown(pipeline, batch_id) is None
    pipeline.drain(make=Exact)
    running = shown(pipeline, batch_id)
    assert running is not None
    assert (running.p50_ms, running.p95_ms) == (None, None)
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    ended = shown(pipeline, batch_id)
    rows = {row.custom_id: row for row in pipeline.line_rows(batch_id)}
    own = {"0": 8, "1": 16, "2": 4 + 16, "3": 8}
    took = {name: rows[name].engine_ms for name in own}
    assert rows["4"].engine_ms is None  # refused: it never came to the engine
    assert min(took.values()) == 0  # one of the two that are alike
    assert ended is not None
    assert ended.tokens == sum(own.values()) == batch.input_tokens
    assert ended.computed_tokens == batch.computed_tokens
    assert batch.engine_rows == 4
    assert batch.engine_s == batch.computed_tokens / 1024 == sum(took.values()) / 1000
    assert batch.useful_tokens == sum(own.values()) - 8
    assert ended.padding == round(1 - batch.useful_tokens / batch.computed_tokens, 4)
    assert ended.tokens_per_second == round(ended.tokens / batch.engine_s, 1)
    ascending = sorted(took.values())
    assert (ended.p50_ms, ended.p95_ms) == (round(ascending[1], 3), round(ascending[3], 3))


def test_a_batch_of_which_nothing_succeeded_says_nothing_of_the_engine(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a", ""), embedding_line("b", [])])
    pipeline.run()
    batch = invariants.check(pipeline, batch_id)
    assert shown(pipeline, batch_id) is None
    assert (batch.p50_ms, batch.p95_ms) == (None, None)


def scraped(api: Api, **headers: str) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels, in the order of the labels' names."""
    answer = httpx.get(f"{api.url}/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def over(pipeline: Pipeline, **changed: Any) -> Any:
    resources = pipeline.resources
    settings = resources.settings.model_copy(update=changed)
    return api_over(settings, resources.database, resources.storage)


def test_one_scrape_shows_every_worker_and_what_there_is_to_do(pipeline: Pipeline) -> None:
    first = pipeline.submit([embedding_line(f"{n}") for n in range(30)])
    pipeline.validate()
    pipeline.plan()
    with over(pipeline) as api, serving(pipeline.resources) as process:
        name = pipeline.resources.name
        before = scraped(api)
        assert before["halfrate_batches", "in_progress"] == 1
        assert before["halfrate_lines", "pending"] == 30
        assert before["halfrate_shards", "stub-embed", "runnable"] == 1
        assert before["halfrate_queue_age_seconds", "stub-embed"] > 0
        assert before["halfrate_engine_info", "stub-chat", "stub", "true", name] == 1
        process.drain("stub-embed")
        with pipeline.resources.database.transaction() as transaction:
            elsewhere = {"m": Figures(steps=77)}
            workers.beat(transaction, "elsewhere", elsewhere, session.now(transaction))
        process.beat()
        after = scraped(api)
    assert after["halfrate_engine_steps_total", "m", "elsewhere"] == 77
    assert after["halfrate_engine_requests_total", "stub-embed", name] == 30
    assert after["halfrate_engine_input_tokens_total", "stub-embed", name] == 30 * 8
    assert after["halfrate_engine_requests_total", "stub-chat", name] == 0
    assert after["halfrate_engine_queue_depth", "stub-embed", name] == 0
    assert after["halfrate_engine_open_shards", "stub-embed", name] == 0
    assert after["halfrate_line_seconds_count", "stub-embed", name] == 30
    assert after["halfrate_batches", "finalizing"] == 1
    assert after["halfrate_lines", "succeeded"] == 30
    assert ("halfrate_shards", "stub-embed", "runnable") not in after
    assert pipeline.finish(first).completed == 30


def test_figures_of_a_worker_of_another_version_are_read_as_far_as_they_are_known(
    pipeline: Pipeline,
) -> None:
    with pipeline.resources.database.transaction() as transaction:
        workers.beat(transaction, "w", {"m": Figures(steps=3)}, session.now(transaction))
        newer = """UPDATE workers SET figures = '{"m": {"steps": 4, "unheard_of": [1]}}'"""
        transaction.execute(text(newer))
        (worker,) = workers.living(transaction)
    assert worker.figures == {"m": Figures(steps=4)}


def refused(api: Api, status: int, **headers: str) -> None:
    answer = httpx.get(f"{api.url}/metrics", headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert TOKEN not in answer.text


def test_without_a_token_only_this_machine_may_read_metrics(pipeline: Pipeline) -> None:
    with over(pipeline) as api:
        scraped(api)
        # The server believes a proxy on this machine, as to who asks.
        refused(api, 403, **{"x-forwarded-for": "192.0.2.7"})
        # A proxy asks for somebody, whatever it says of him.
        for header in ("x-forwarded-for", "forwarded", "x-real-ip", "via"):
            refused(api, 403, **{header: "127.0.0.1"})


def test_with_a_token_everybody_needs_it(pipeline: Pipeline) -> None:
    with over(pipeline, metrics_token=SecretStr(TOKEN)) as api:
        assert scraped(api, authorization=f"Bearer {TOKEN}")
        assert scraped(api, authorization=f"bearer {TOKEN}", **{"x-forwarded-for": "192.0.2.7"})
        for wrong in ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {api.key}"):
            refused(api, 401, authorization=wrong)
        refused(api, 401)


def test_a_short_token_is_refused_at_the_start(settings: Settings) -> None:
    values = settings.model_dump()
    for short in ("", "x" * 15):
        with pytest.raises(ValidationError, match="metrics_token"):
            Settings(**{**values, "metrics_token": short})
