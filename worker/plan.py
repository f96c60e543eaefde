"""In which order, and in how large shards, are a batch's lines run?

Lines are tokenised ahead and sorted by model, shared prefix and length, so that neighbours in a
shard pad little and meet their prefix in one worker; then cut into shards of a few seconds' work.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray
from sqlalchemy import select

from engine.surface import TokenizerLike
from service.bodies.check import InvalidBody, Rules
from service.catalog import Catalog, Model, ModelKind
from service.db import batches, lines, queue, session, workers
from service.db.models import Batch, File
from service.jsonl import RawLine, split
from worker import prompts
from worker.fetch import fetch
from worker.lease import KeptLease
from worker.resources import Resources
from worker.tokenizers import tokenizer_of

log = structlog.get_logger()

PREFIX_TOKENS = 64
"""So many first tokens tell whether two prompts begin alike."""

OUTPUT_WEIGHT = 4
"""A generated token costs about as much as so many prompt tokens, which run many at a time."""

EXPECTED_OUTPUT = 64
"""Most answers end before max_tokens; more than this is not planned for."""

DEFAULT_SPEEDS: Mapping[ModelKind, float] = {
    ModelKind.EMBED: 3_000.0,
    ModelKind.GENERATE: 400.0,
    ModelKind.CLASSIFY: 3_000.0,
    ModelKind.SCORE: 3_000.0,
}
"""Tokens a second of a model that no worker has measured yet: two CPU cores and a small model."""

MAX_COST = 2**31 - 1
"""Of one line, as the plan keeps it."""

LINES_AT_ONCE = 1_000
"""Rows of a retry's lines that are held at once."""

MAX_SHARD_LINES = 10_000
"""Bounds a shard of very short lines, so that claims and write-backs stay small."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the plan knows of each line, 20 bytes a line."""

    line: NDArray[np.int32]
    model: NDArray[np.int32]  # index into the batch's models
    prefix: NDArray[np.uint64]
    tokens: NDArray[np.int32]


def plan(resources: Resources, kept: KeptLease) -> None:
    """Cut the batch into shards, all in one transaction, and wake the engines."""
    batch_id = kept.lease.batch_id
    with resources.database.transaction() as transaction:
        batch, file = transaction.execute(
            select(Batch, File)
            .join(File, File.id == Batch.input_file_id)
            .where(Batch.id == batch_id)
        ).one()
        speeds = workers.speeds(transaction)
    counter = _Counter(resources, batch.endpoint, kept)
    costs = counter.count(_lines_of(resources, batch, file))
    budgets = [
        _speed(resources.catalog, speeds, model) * resources.settings.shard_s
        for model in counter.models
    ]
    shards = (
        queue.NewShard(counter.models[model], lines, cost)
        for model, lines, cost in cut(costs, budgets)
    )
    with resources.database.transaction() as transaction:
        now = session.now(transaction)
        queue.lock_batch(transaction, batch_id)
        queue.settle(transaction, kept.lease)
        number = queue.add_shards(transaction, batch_id, shards, not_before=now)
        batches.advance(transaction, batch_id, now)
    log.info("planned", batch=batch_id.hex, lines=len(costs.line), shards=number)
    for model in counter.models:
        resources.waker.drain(model)


def _lines_of(resources: Resources, batch: Batch, file: File) -> Iterator[RawLine]:
    """The batch's lines with their bytes, in input order."""
    if batch.retry_of is not None:
        return _some_lines(resources, batch, file)
    # Every line was found small enough; a limit that was lowered since then must not lose one.
    return split(resources.storage.stream(file.storage_key), limit=max(1, file.bytes))


def _some_lines(resources: Resources, batch: Batch, file: File) -> Iterator[RawLine]:
    """Those that a retry took over; the rest of the file is not read."""
    last = 0
    while True:
        with resources.database.transaction() as transaction:
            rows = lines.pending_after(transaction, batch.id, after=last, limit=LINES_AT_ONCE)
        if not rows:
            return
        for row, raw in fetch(resources.storage, file.storage_key, rows):
            yield RawLine(row.line, row.byte_offset, row.byte_length, raw)
        last = rows[-1].line


def _speed(catalog: Catalog, speeds: Mapping[str, float], model_id: str) -> float:
    model = catalog.get(model_id)
    kind = ModelKind.GENERATE if model is None else model.kind
    return speeds.get(model_id, DEFAULT_SPEEDS[kind])


class _Counter:
    """Reads the input file once more, now with tokenizers."""

    def __init__(self, resources: Resources, endpoint: str, kept: KeptLease) -> None:
        self._resources = resources
        self._endpoint = endpoint
        self._kept = kept
        self._rules = Rules.of(resources.settings)
        self._indices: dict[str, int] = {}
        self._tokenizers: dict[str, tuple[Model, TokenizerLike] | None] = {}

    @property
    def models(self) -> list[str]:
        """The models named, in the order of their first lines."""
        return list(self._indices)

    def count(self, raw_lines: Iterable[RawLine]) -> Costs:
        line, model, tokens = array("i"), array("i"), array("i")
        prefix = array("Q")
        for position, found in enumerate(raw_lines):
            if position % 1_000 == 0:
                self._kept.check_cancelling()
            if found.raw is None:
                continue
            body = orjson.loads(found.raw)["body"]
            cost, start = self._cost(body)
            line.append(found.number)
            model.append(self._indices.setdefault(body["model"], len(self._indices)))
            tokens.append(min(cost, MAX_COST))
            prefix.append(start)
        return Costs(
            line=np.frombuffer(line, dtype=np.int32),
            model=np.frombuffer(model, dtype=np.int32),
            prefix=np.frombuffer(prefix, dtype=np.uint64),
            tokens=np.frombuffer(tokens, dtype=np.int32),
        )

    def _cost(self, body: dict[str, object]) -> tuple[int, int]:
        """Tokens of work and a hash of how the prompt begins. A bad body costs next to nothing."""
        known = self._tokenizer(str(body["model"]))
        if known is None:
            return 1, 0
        model, tokenizer = known
        try:
            prompt = prompts.read(
                body,
                endpoint=self._endpoint,
                model=model,
                tokenizer=tokenizer,
                rules=self._rules,
            )
        except InvalidBody:
            return 1, 0
        taken = sum(len(sequence) for sequence in prompt.sequences)
        if isinstance(prompt, prompts.Embed):
            return taken, 0
        expected = min(prompt.sampling.max_tokens, EXPECTED_OUTPUT)
        answers = len(prompt.sequences) * prompt.choices
        begin = hash(prompt.sequences[0][:PREFIX_TOKENS]) & 0xFFFF_FFFF_FFFF_FFFF
        return taken * prompt.choices + answers * expected * OUTPUT_WEIGHT, begin

    def _tokenizer(self, model_id: str) -> tuple[Model, TokenizerLike] | None:
        if model_id not in self._tokenizers:
            model = self._resources.catalog.get(model_id)
            self._tokenizers[model_id] = (
                None
                if model is None
                else (model, tokenizer_of(model, self._resources.settings.models))
            )
        return self._tokenizers[model_id]


def cut(costs: Costs, budgets: list[float]) -> Iterator[tuple[int, list[int], int]]:
    """Shards as (model index, lines, cost): each within its model's budget, or a single line.

    Sorted by model, prefix and length; ties stay in input order.
    """
    order = np.lexsort((costs.line, costs.tokens, costs.prefix, costs.model))
    lines: list[int] = []
    spent, current = 0, -1
    for index in order:
        model, tokens = int(costs.model[index]), max(1, int(costs.tokens[index]))
        full = lines and (spent + tokens > budgets[current] or len(lines) == MAX_SHARD_LINES)
        if lines and (model != current or full):
            yield current, lines, spent
            lines, spent = [], 0
        current = model
        lines.append(int(costs.line[index]))
        spent += tokens
    if lines:
        yield current, lines, spent
