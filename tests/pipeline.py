"""How do tests run a batch's stages by hand, in one process, in an order of their choosing?"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select

from engine.config import EngineConfig, Kind
from engine.stub import StubEngine, StubTokenizer
from engine.surface import EngineLike
from service.batch import StageName
from service.clock import monotonic
from service.db import batches, session
from service.db.models import Batch, File, RequestLine
from service.ids import new_id
from worker import assemble, clean, plan, stages, validate
from worker.drain import Drain
from worker.engine_loop import EngineLoop
from worker.execute import ModelOnLoop
from worker.lease import Keeper
from worker.resources import Resources


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


@dataclass(frozen=True)
class Pipeline:
    """A project, and the stages of its batches, each done when the test says so."""

    resources: Resources
    project_id: uuid.UUID

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
        stages.run_ready(self.resources, StageName.CLEAN, clean.clean)

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
        config = EngineConfig(model=Path("."), kind=Kind(model.kind))
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
                ModelOnLoop(model, StubTokenizer(), loop),
                keeper,
                stopping=stopping,
                clock=monotonic,
            )

    def drain(self, model_id: str = "stub-embed") -> None:
        """Every shard of that model that is runnable."""
        with self.engine(model_id) as drain:
            drain.run()

    def run(self, *models: str) -> None:
        """The whole way, as workers go it."""
        self.validate()
        self.plan()
        for model in models or ("stub-embed",):
            self.drain(model)
        self.assemble()
        self.clean()

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
