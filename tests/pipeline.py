"""How do tests run a batch's stages by hand, in one process, in an order of their choosing?"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select, update

from engine.config import EngineConfig, Kind
from engine.stub import StubEngine, StubTokenizer
from engine.surface import EngineLike
from service.batch import TERMINAL, BatchStatus, ShardState, StageName
from service.clock import monotonic
from service.db import batches, session
from service.db.models import Batch, File, Project, RequestLine, Shard, Stage
from service.ids import new_id
from worker import assemble, clean, plan, remove, stages, tick, validate
from worker.drain import Drain, Places
from worker.engine_loop import EngineLoop
from worker.execute import ModelOnLoop
from worker.lease import Keeper
from worker.resources import Resources

MODELS = """
[[models]]
id = "stub-embed"
kind = "embed"
source = "stub:"
price_input = 0.02

[[models]]
id = "stub-other"
kind = "embed"
source = "stub:"
context_length = 64
price_input = 0.07
discount = 0.25

[[models]]
id = "stub-chat"
kind = "generate"
source = "stub:"
price_input = 0.10
price_output = 0.40
default_max_tokens = 16

[[models]]
id = "stub-small"
kind = "embed"
source = "stub:"
context_length = 64
dimensions = [4, 16]
prompts = {query = "search: ", passage = "found: "}
price_input = 0.02

[[models]]
id = "stub-classify"
kind = "classify"
source = "stub:"
context_length = 64
moderation = {labels = {negative = "harassment", neutral = "violence/graphic"}}
price_input = 0.02

[[models]]
id = "stub-tags"
kind = "token_classify"
source = "stub:"
context_length = 64
price_input = 0.02

[[models]]
id = "stub-score"
kind = "score"
source = "stub:"
context_length = 64
price_input = 0.02

[[models]]
id = "all-minilm-l6-v2"
kind = "embed"
source = "stub:"
context_length = 256
price_input = 0.02

[[models]]
id = "smollm2-135m-instruct"
kind = "generate"
source = "stub:"
price_input = 0.10
price_output = 0.40
"""
"""Stubs, two of them under the demo models' ids, so that the cases of tests/cases run on them."""


def embedding_line(custom_id: str, text: object = "a text", model: str = "stub-embed") -> bytes:
    """One request line for /v1/embeddings."""
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": model, "input": text},
        }
    )


def chat_line(custom_id: str, text: str = "hello", **body: object) -> bytes:
    """One request line for /v1/chat/completions."""
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "stub-chat",
                "messages": [{"role": "user", "content": text}],
                **body,
            },
        }
    )


def completion_line(custom_id: str, prompt: object = "hello", **body: object) -> bytes:
    """One request line for /v1/completions."""
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "stub-chat", "prompt": prompt, **body},
        }
    )


@dataclass(frozen=True)
class Pipeline:
    """A project, and the stages of its batches, each done when the test says so."""

    resources: Resources
    project_id: uuid.UUID

    @classmethod
    def with_project(cls, resources: Resources) -> "Pipeline":
        """One whose project is new."""
        project_id = new_id()
        with resources.database.transaction() as transaction:
            now = session.now(transaction)
            transaction.add(Project(id=project_id, name="test", created_at=now))
        return cls(resources, project_id)

    def submit(
        self,
        lines: Sequence[bytes] | bytes,
        endpoint: str = "/v1/embeddings",
        window: timedelta = timedelta(hours=24),
    ) -> uuid.UUID:
        """Upload a file and create its batch."""
        data = lines if isinstance(lines, bytes) else b"\n".join(lines) + b"\n"
        file_id = new_id()
        key = f"files/{self.project_id.hex}/{file_id.hex}"
        self.resources.storage.put(key, data)
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            transaction.add(
                File(
                    id=file_id,
                    project_id=self.project_id,
                    purpose="batch",
                    filename="input.jsonl",
                    bytes=len(data),
                    storage_key=key,
                    created_at=now,
                )
            )
            transaction.flush()
            return batches.create(
                transaction,
                project_id=self.project_id,
                endpoint=endpoint,
                input_file_id=file_id,
                completion_window="24h",
                window=window,
                metadata=None,
                output_expires_after_s=None,
                now=now,
            ).id

    def having(self, **settings: object) -> "Pipeline":
        """The same project, seen by workers of other settings."""
        changed = self.resources.settings.model_copy(update=settings)
        return replace(self, resources=replace(self.resources, settings=changed))

    def validate(self) -> None:
        """Every validate stage that is ready."""
        stages.run_ready(self.resources, StageName.VALIDATE, validate.validate)

    def plan(self) -> None:
        """Every plan stage that is ready."""
        stages.run_ready(self.resources, StageName.PLAN, plan.plan)

    def assemble(self) -> None:
        """Every assemble stage that is ready."""
        stages.run_ready(self.resources, StageName.ASSEMBLE, assemble.assemble)

    def clean(self) -> None:
        """Every clean stage that is ready."""
        clean.clean_ready(self.resources)

    def remove(self) -> None:
        """Every remove stage that is ready."""
        stages.run_ready(self.resources, StageName.REMOVE, remove.remove)

    @contextmanager
    def engine(
        self,
        model_id: str = "stub-embed",
        make: Callable[[], EngineLike] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[Drain]:
        """An engine worker of that model."""
        model = self.resources.catalog.get(model_id)
        assert model is not None
        config = EngineConfig(
            model=Path(),
            kind=Kind(model.kind),
            context_length=model.context_length,
            dimensions=model.dimensions,
        )
        loop = EngineLoop(
            make or (lambda: StubEngine(config, results_per_step=8)), clock=monotonic, name="test"
        )
        keeper = Keeper(
            self.resources.database,
            lease=self.resources.settings.lease,
            every_s=self.resources.settings.renew_s,
        )
        with loop, keeper:
            yield Drain(
                self.resources,
                ModelOnLoop(model, StubTokenizer(model.prompts), loop),
                keeper,
                Places(),
                stopping=stopping,
                clock=monotonic,
            )

    def drain(
        self, model_id: str = "stub-embed", make: Callable[[], EngineLike] | None = None
    ) -> None:
        """Every shard of that model that is runnable."""
        with self.engine(model_id, make) as drain:
            drain.run()

    def drain_one(self, model_id: str = "stub-embed") -> None:
        """The next shard of that model, and no other."""
        with self.engine(model_id) as drain:
            shard = drain._claim()
            assert shard is not None
            drain._run(shard)

    def run(self, *models: str) -> None:
        """The whole way, as workers go it."""
        self.validate()
        self.plan()
        for model in models or ("stub-embed",):
            self.drain(model)
        self.assemble()
        self.clean()

    def finish(
        self,
        batch_id: uuid.UUID,
        *models: str,
        make: Callable[[], EngineLike] | None = None,
        rounds: int = 12,
    ) -> Batch:
        """Tick and work, as a healthy service does, until the batch has ended and is cleaned up.

        Whatever waits for a time is let through at once.
        """
        for _ in range(rounds):
            self.skip_waits()
            tick.tick(self.resources)
            self.validate()
            self.plan()
            for model in models or ("stub-embed",):
                self.drain(model, make)
            self.assemble()
            self.clean()
            batch = self.batch(batch_id)
            if batch.status in TERMINAL and not self.open_stages(batch_id):
                return batch
        raise AssertionError(f"still {batch.status} after {rounds} rounds")

    def skip_waits(self) -> None:
        """Backoffs and retry times are over."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            for table in (Stage, Shard):
                transaction.execute(update(table).values(not_before=now))

    def lose_workers(self) -> None:
        """No lease was renewed for long enough, and the tick has noticed."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            for table in (Stage, Shard):
                leased = table.state == ShardState.LEASED
                transaction.execute(update(table).where(leased).values(lease_expires_at=now))
        tick.reap(self.resources.database)

    def end_window(self, batch_id: uuid.UUID) -> None:
        """The batch's window is over; nobody has noticed yet."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            transaction.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=now))

    def expire(self, batch_id: uuid.UUID) -> None:
        """The batch's window is over, and the tick has noticed."""
        self.end_window(batch_id)
        tick.close_due(self.resources.database)

    def cancel(self, batch_id: uuid.UUID) -> BatchStatus:
        """What POST …/cancel does; the status it shows."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            batch = batches.cancel(transaction, self.project_id, batch_id, now)
            assert batch is not None
            return batch.status

    def pause(self, batch_id: uuid.UUID) -> None:
        """What POST …/pause does."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            assert batches.pause(transaction, self.project_id, batch_id, now) is not None

    def resume(self, batch_id: uuid.UUID) -> None:
        """What POST …/resume does."""
        with self.resources.database.transaction() as transaction:
            assert batches.resume(transaction, self.project_id, batch_id) is not None

    def retry(self, batch_id: uuid.UUID) -> uuid.UUID:
        """What POST …/retry does; the new batch."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            made = batches.retry(transaction, self.project_id, batch_id, now)
            assert made is not None
            return made.id

    def delete(self, batch_id: uuid.UUID) -> bool:
        """What DELETE does."""
        with self.resources.database.transaction() as transaction:
            now = session.now(transaction)
            return batches.delete(transaction, self.project_id, batch_id, now)

    def open_stages(self, batch_id: uuid.UUID) -> list[StageName]:
        """Stages that are ready or leased."""
        with self.resources.database.transaction() as transaction:
            query = select(Stage.name).where(
                Stage.batch_id == batch_id, Stage.state.in_([ShardState.READY, ShardState.LEASED])
            )
            return list(transaction.scalars(query))

    def shards(self, batch_id: uuid.UUID) -> list[Shard]:
        """The batch's shards in plan order."""
        with self.resources.database.transaction() as transaction:
            query = select(Shard).where(Shard.batch_id == batch_id).order_by(Shard.ordinal)
            return list(transaction.scalars(query))

    def batch(self, batch_id: uuid.UUID) -> Batch:
        """The batch's row as it stands."""
        with self.resources.database.transaction() as transaction:
            return transaction.execute(select(Batch).where(Batch.id == batch_id)).scalar_one()

    def line_rows(self, batch_id: uuid.UUID) -> list[RequestLine]:
        """The batch's lines in input order."""
        with self.resources.database.transaction() as transaction:
            query = select(RequestLine).where(RequestLine.batch_id == batch_id)
            return list(transaction.scalars(query.order_by(RequestLine.line)))

    def result(self, file_id: uuid.UUID | None) -> list[dict[str, Any]]:
        """The lines of an output or error file; none where there is no file."""
        if file_id is None:
            return []
        with self.resources.database.transaction() as transaction:
            file = transaction.execute(select(File).where(File.id == file_id)).scalar_one()
        data = self.resources.storage.read(file.storage_key)
        assert data.endswith(b"\n")
        assert len(data) == file.bytes
        return [orjson.loads(line) for line in data[:-1].split(b"\n")]

    def output(self, batch_id: uuid.UUID) -> list[dict[str, Any]]:
        """The output file's lines."""
        return self.result(self.batch(batch_id).output_file_id)

    def errors(self, batch_id: uuid.UUID) -> list[dict[str, Any]]:
        """The error file's lines."""
        return self.result(self.batch(batch_id).error_file_id)
