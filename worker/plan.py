"""In which order, and in how large shards, are a batch's lines run?

Lines are tokenised ahead and sorted by model, then by shared prefix and length where it generates,
by length and content where it encodes: neighbours in a shard pad little, meet their prefix in one
worker, and what stands in the file twice is computed once. Then they are cut into shards of a few
seconds' work.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from worker.figures import OUTPUT_WEIGHT
from worker.lease import KeptLease
from worker.prompts import Generate, Prompt
from worker.readings import Reading, ZeroShot
from worker.resources import Resources
from worker.tokenizers import tokenizer_of

log = structlog.get_logger()

PREFIX_TOKENS = 64
"""So many first tokens tell whether two prompts begin alike."""

EXPECTED_OUTPUT = 64
"""Most answers end before max_tokens; more than this is not planned for."""

DEFAULT_SPEEDS: Mapping[ModelKind, float] = {
    ModelKind.EMBED: 3_000.0,
    ModelKind.GENERATE: 1_500.0,
    ModelKind.CLASSIFY: 3_000.0,
    ModelKind.SCORE: 3_000.0,
    ModelKind.TOKEN_CLASSIFY: 3_000.0,
}
"""Weight in tokens that is done in a second, of a model that no worker has measured yet: two CPU
cores and a small model."""

MAX_COST = 2**31 - 1
"""Of one line, as the plan keeps it."""

LINES_AT_ONCE = 1_000
"""Rows of a retry's lines that are held at once."""

MAX_SHARD_LINES = 10_000
"""Bounds a shard of very short lines, so that claims and write-backs stay small."""


TWIN_COST = 1
"""Of a line that repeats its neighbour: the engine computes it once."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the plan knows of each line, 20 bytes a line.

    Lines are sorted by `key`: a digest of how the prompt begins; of a line to be encoded its length
    and a digest of all of it, so that twins have the same.
    """

    line: NDArray[np.int32]
    model: NDArray[np.int32]  # index into the batch's models
    key: NDArray[np.uint64]
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
        for model, lines, cost in cut(costs, budgets, counter.encoders)
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

    @property
    def encoders(self) -> frozenset[int]:
        """Which of them encode."""
        return frozenset(
            index
            for name, index in self._indices.items()
            if (model := self._resources.catalog.get(name)) is not None
            and model.kind is not ModelKind.GENERATE
        )

    def count(self, raw_lines: Iterable[RawLine]) -> Costs:
        line, model, tokens = array("i"), array("i"), array("i")
        keys = array("Q")
        for position, found in enumerate(raw_lines):
            if position % 1_000 == 0:
                self._kept.check_cancelling()
            if found.raw is None:
                continue
            body = orjson.loads(found.raw)["body"]
            cost, key = self._cost(body)
            line.append(found.number)
            model.append(self._indices.setdefault(body["model"], len(self._indices)))
            tokens.append(min(cost, MAX_COST))
            keys.append(key)
        return Costs(
            line=np.frombuffer(line, dtype=np.int32),
            model=np.frombuffer(model, dtype=np.int32),
            key=np.frombuffer(keys, dtype=np.uint64),
            tokens=np.frombuffer(tokens, dtype=np.int32),
        )

    def _cost(self, body: dict[str, object]) -> tuple[int, int]:
        """Tokens of work and the line's key. A bad body costs next to nothing."""
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
        return weigh(prompt)

    def _tokenizer(self, model_id: str) -> tuple[Model, TokenizerLike] | None:
        if model_id not in self._tokenizers:
            model = self._resources.catalog.get(model_id)
            self._tokenizers[model_id] = (
                None
                if model is None
                else (model, tokenizer_of(model, self._resources.settings.models))
            )
        return self._tokenizers[model_id]


def weigh(prompt: Prompt) -> tuple[int, int]:
    """Tokens of work of a line, and its key."""
    match prompt:
        case Generate():
            taken = sum(len(sequence) for sequence in prompt.sequences)
            expected = min(prompt.sampling.max_tokens, EXPECTED_OUTPUT)
            answers = len(prompt.sequences) * prompt.choices
            begin = hash(prompt.sequences[0][:PREFIX_TOKENS]) & 0xFFFF_FFFF_FFFF_FFFF
            if prompt.labels is not None:
                # All forks read one prompt, and a few tokens more.
                return taken + len(prompt.sequences) * prompt.labels.tree.tokens, begin
            return taken * prompt.choices + answers * expected * OUTPUT_WEIGHT, begin
        case ZeroShot():
            # Lines share their labels, which are computed once; each is compared all the same.
            return _weigh(prompt.texts, more=len(prompt.labels))
        case _:
            return _weigh(prompt.readings)


def _weigh(readings: Sequence[Reading], *, more: int = 0) -> tuple[int, int]:
    tokens = min(MAX_COST, sum(len(reading.tokens) for reading in readings) + more)
    digest = hash(tuple(reading.tokens for reading in readings)) & 0xFFFF_FFFF
    return tokens, tokens << 32 | digest


def cut(
    costs: Costs, budgets: Sequence[float], encoders: Collection[int] = ()
) -> Iterator[tuple[int, list[int], int]]:
    """Shards as (model index, lines, cost): each within its model's budget, or a single line.

    Sorted by model, key and tokens; ties stay in input order. Lines of an encoder that have the
    same key stay together where one shard can hold them, and all but the first cost `TWIN_COST`.
    """
    order = np.lexsort((costs.line, costs.tokens, costs.key, costs.model))
    lines: list[int] = []
    spent, current = 0, -1
    for run in _runs(costs, order, encoders):
        model, tokens = int(costs.model[run[0]]), max(1, int(costs.tokens[run[0]]))
        whole = tokens + (len(run) - 1) * TWIN_COST
        together = whole <= budgets[model] and len(run) <= MAX_SHARD_LINES
        if lines and (
            model != current
            or (together and spent + whole > budgets[model])
            or (together and len(lines) + len(run) > MAX_SHARD_LINES)
        ):
            yield current, lines, spent
            lines, spent = [], 0
        current = model
        for position, index in enumerate(run):
            cost = TWIN_COST if position and lines else tokens
            full = spent + cost > budgets[model] or len(lines) == MAX_SHARD_LINES
            if lines and full:
                yield current, lines, spent
                lines, spent, cost = [], 0, tokens
            lines.append(int(costs.line[index]))
            spent += cost
    if lines:
        yield current, lines, spent


def _runs(
    costs: Costs, order: NDArray[np.intp], encoders: Collection[int]
) -> Iterator[NDArray[np.intp]]:
    """Runs of twins; of a model that generates each line by itself."""
    model, key = costs.model[order], costs.key[order]
    same = (model[1:] == model[:-1]) & (key[1:] == key[:-1]) & np.isin(model[1:], list(encoders))
    begin = 0
    for last in np.flatnonzero(~same):
        end = int(last) + 1
        yield order[begin:end]
        begin = end
    if len(order):
        yield order[begin:]
