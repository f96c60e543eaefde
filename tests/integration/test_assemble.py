"""Is the merge of many parts the same as sorting everything in memory, and is it done once?"""

import random
from collections import Counter
from collections.abc import Callable
from uuid import UUID

import pytest

from service.batch import BatchStatus, StageName
from service.storage import Storage
from tests import invariants
from tests.pipeline import Pipeline, embedding_line
from tests.stand_ins import Failing
from tests.threads import running
from worker import assemble, stages
from worker.lease import KeptLease
from worker.resources import Resources
from worker.write_back import FAILED, SUCCEEDED, Record, decode, encode


def parts(storage: Storage, number: int, lines: int, seed: int) -> list[str]:
    """So many parts, with so many lines dealt out to them, some of them long and none empty."""
    chance = random.Random(seed)
    dealt: list[list[Record]] = [[] for _ in range(number)]
    for line in chance.sample(range(1, 10 * lines), lines):
        data = b"%d " % line + b"x" * chance.choice([0, 5, 300, 3_000])
        dealt[chance.randrange(number)].append(
            Record(line, chance.choice([SUCCEEDED, FAILED]), data)
        )
    keys = []
    for n, records in enumerate(dealt):
        keys.append(f"merge-test/{seed}-{n}")
        storage.put(keys[-1], b"".join(map(encode, sorted(records))))
    return keys


def reference(storage: Storage, keys: list[str]) -> list[Record]:
    """The slow, obvious way: everything in memory, sorted."""
    raw = [line for key in keys for line in storage.read(key).split(b"\n") if line]
    return sorted(map(decode, raw))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 9, 10, 28])
@pytest.mark.parametrize("block", [64, 4_096])
def test_the_merge_equals_a_sort_in_memory(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, number: int, block: int
) -> None:
    monkeypatch.setattr(assemble, "BLOCK", block)
    storage = pipeline.resources.storage
    keys = parts(storage, number, 40 if number else 0, seed=number) if number else []
    # At three parts at a time, 28 make runs of runs of runs.
    merged = list(assemble.merge_parts(storage, keys, fan_in=3, check=lambda: None))
    assert merged == reference(storage, keys)
    assert len(merged) == (40 if number else 0)


def test_no_more_is_open_or_read_ahead_than_the_fan_in_and_a_block_each(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "BLOCK", 1_024)
    opened: Counter[str] = Counter()
    most = [0, 0]
    real_read, real_part = Storage.read, assemble._read_part

    def counted_part(storage: Storage, key: str) -> object:
        opened[key] += 1
        most[0] = max(most[0], len(+opened))
        yield from real_part(storage, key)
        opened[key] -= 1

    def counted_read(
        storage: Storage, key: str, start: int = 0, length: int | None = None
    ) -> bytes:
        assert length is not None
        most[1] = max(most[1], length)
        return real_read(storage, key, start, length)

    storage = pipeline.resources.storage
    keys = parts(storage, 20, 120, seed=99)
    expected = reference(storage, keys)
    monkeypatch.setattr(assemble, "_read_part", counted_part)
    monkeypatch.setattr(Storage, "read", counted_read)
    found = list(assemble.merge_parts(storage, keys, fan_in=4, check=lambda: None))
    assert found == expected
    assert most == [4, 1_024]


def test_the_longer_the_lines_the_fewer_parts_are_merged_at_once() -> None:
    block, bound = assemble.BLOCK, assemble.MERGE_BYTES
    assert assemble.fan_in(1_000) == assemble.FAN_IN
    for longest in (2_000_000, 10_000_000, 100_000_000):
        assert 2 <= assemble.fan_in(longest) < assemble.FAN_IN
        assert assemble.fan_in(longest) * 3 * (block + longest) <= bound or longest > bound // 7
    assert assemble.fan_in(10**12) == 2


def test_a_long_merge_ends_when_its_lease_is_lost(pipeline: Pipeline) -> None:
    storage = pipeline.resources.storage
    keys = parts(storage, 9, 40, seed=5)

    def lost() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        list(assemble.merge_parts(storage, keys, fan_in=3, check=lost))


def submitted(pipeline: Pipeline, number: int = 40) -> UUID:
    texts = ["invalid x" if n % 5 == 0 else f"text {n}" for n in range(number)]
    batch_id = pipeline.submit([embedding_line(f"{n}", text) for n, text in enumerate(texts)])
    pipeline.validate()
    pipeline.plan()
    pipeline.drain(make=lambda: Failing(Counter(), results_per_step=2))
    return batch_id


def test_a_batch_of_more_parts_than_the_fan_in_is_whole_and_in_order(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "FAN_IN", 2)
    monkeypatch.setattr(assemble, "BLOCK", 200)
    small = pipeline.having(shard_s=0.01)
    batch_id = submitted(small)
    storage = small.resources.storage
    assert len(list(storage.list(f"parts/{batch_id.hex}/"))) > 8
    small.assemble()
    small.clean()
    batch = invariants.check(small, batch_id)
    assert (batch.completed, batch.failed) == (32, 8)
    assert [line["custom_id"] for line in small.errors(batch_id)] == [
        f"{n}" for n in range(0, 40, 5)
    ]


def test_answered_and_frozen_lines_meet_in_input_order(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.001)
    texts = [f"out_of_memory {n}" if n % 3 else f"invalid {n}" for n in range(12)]
    batch_id = small.submit([embedding_line(f"{n}", text) for n, text in enumerate(texts)])
    small.validate()
    small.plan()
    small.drain(make=lambda: Failing(Counter()))
    small.expire(batch_id)
    small.assemble()
    small.clean()
    batch = invariants.check(small, batch_id)
    assert (batch.status, batch.failed, batch.completed) == (BatchStatus.EXPIRED, 4, 0)
    found = [(line["custom_id"], line["response"] is None) for line in small.errors(batch_id)]
    assert found == [(f"{n}", bool(n % 3)) for n in range(12)]


def test_two_assemblies_at_once_publish_one(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline)

    def slow(resources: Resources, kept: KeptLease) -> None:
        pipeline.lose_workers()
        pipeline.assemble()  # somebody else's attempt
        published.append(pipeline.batch(batch_id).output_file_id)
        assemble.assemble(resources, kept)

    published: list[UUID | None] = []
    stages.run_ready(pipeline.resources, StageName.ASSEMBLE, slow)
    assert pipeline.batch(batch_id).output_file_id == published[0] is not None
    # The one that came too late removed what it had written.
    results = f"results/{batch_id.hex}/"
    assert len(list(pipeline.resources.storage.list(results))) == 2
    pipeline.clean()
    invariants.check(pipeline, batch_id)


def test_workers_that_assemble_at_the_same_moment_publish_one(pipeline: Pipeline) -> None:
    ids = [submitted(pipeline, 5) for _ in range(3)]
    with running(*[pipeline.assemble] * 3):
        pass
    pipeline.assemble()
    pipeline.clean()
    for batch_id in ids:
        invariants.check(pipeline, batch_id)


def lost(storage: Storage, batch_id: UUID) -> None:
    """A record is missing from a part."""
    key = next(iter(storage.list(f"parts/{batch_id.hex}/")))
    storage.put(key, storage.read(key).split(b"\n", 1)[1])


def doubled(storage: Storage, batch_id: UUID) -> None:
    """A record stands twice."""
    key = next(iter(storage.list(f"parts/{batch_id.hex}/")))
    data = storage.read(key)
    storage.put(key, data.split(b"\n", 1)[0] + b"\n" + data)


def one_for_another(storage: Storage, batch_id: UUID) -> None:
    """The number is right, and yet one line stands twice and another not at all."""
    key = next(iter(storage.list(f"parts/{batch_id.hex}/")))
    first, second, rest = storage.read(key).split(b"\n", 2)
    assert first != second
    storage.put(key, b"\n".join([first, first, rest]))


@pytest.mark.parametrize("damage", [lost, doubled, one_for_another])
def test_files_that_would_not_hold_every_line_once_are_not_published(
    pipeline: Pipeline, damage: Callable[[Storage, UUID], None]
) -> None:
    batch_id = submitted(pipeline)
    damage(pipeline.resources.storage, batch_id)
    pipeline.assemble()
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.FINALIZING
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert list(pipeline.resources.storage.list(f"results/{batch_id.hex}/")) == []
