"""Does a backup made in the middle of everything hold one moment whole, and nothing damaged pass?

The database and the bucket of a worker, backed up and filled in elsewhere; `halfrate backup` and
`restore` on whole homes are in test_backup_of_a_home.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select

from service.backup import take
from service.backup.archive import Archive, BackupError, Entry, Manifest
from service.backup.objects import copy_in
from service.backup.restore import fill, restore
from service.batch import TERMINAL, BatchStatus
from service.db import files, removals, session, uploads
from service.db.models import Batch, File, Part
from service.stack.home import Home
from service.storage import MissingObject
from tests import invariants
from tests.elsewhere import empty_database, resources_on, settings_elsewhere
from tests.integration.test_leftovers import begun
from tests.pipeline import Pipeline, embedding_line
from worker import leftovers

NUMBER = 30


def quiet(_: str) -> None:
    pass


def backed_up(pipeline: Pipeline, folder: Path, *, with_bytes: bool = True) -> Manifest:
    folder.mkdir()
    return take.write(
        pipeline.resources.settings, Archive(folder), with_bytes=with_bytes, say=quiet
    )


@contextmanager
def filled(pipeline: Pipeline, folder: Path, *, absent: int = 0) -> Iterator[Pipeline]:
    """The same project where the backup was brought back to."""
    settings = pipeline.resources.settings
    with empty_database(settings.database_url.get_secret_value()) as url:
        elsewhere = settings_elsewhere(settings, url)
        assert fill(elsewhere, Archive(folder), quiet) == absent
        with resources_on(pipeline.resources, elsewhere) as resources:
            yield Pipeline(resources, pipeline.project_id)


def submitted(pipeline: Pipeline, name: str) -> UUID:
    return pipeline.submit([embedding_line(f"{name}-{n}", f"text {n}") for n in range(NUMBER)])


def in_every_phase(pipeline: Pipeline) -> dict[str, UUID]:
    """A batch that has ended, one of whose lines some are answered, and so on: by phase."""
    small = pipeline.having(shard_s=0.001)
    batches = {"completed": submitted(pipeline, "completed")}
    pipeline.run()
    batches["drained"] = submitted(pipeline, "drained")
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    batches["half drained"] = submitted(pipeline, "half drained")
    small.validate()
    small.plan()
    pipeline.drain_one()
    batches["planned"] = submitted(pipeline, "planned")
    small.validate()
    small.plan()
    batches["validated"] = submitted(pipeline, "validated")
    pipeline.validate()
    batches["submitted"] = submitted(pipeline, "submitted")
    found = {name: pipeline.batch(each).status for name, each in batches.items()}
    assert found == {
        "completed": BatchStatus.COMPLETED,
        "drained": BatchStatus.FINALIZING,
        "half drained": BatchStatus.IN_PROGRESS,
        "planned": BatchStatus.IN_PROGRESS,
        "validated": BatchStatus.IN_PROGRESS,
        "submitted": BatchStatus.VALIDATING,
    }
    assert 0 < pipeline.batch(batches["half drained"]).completed < NUMBER
    return batches


def answers(pipeline: Pipeline, batch_id: UUID) -> list[tuple[str, Any]]:
    """What the output file says, without the ids that an attempt gives."""
    return [
        (line["custom_id"], line["response"]["body"]["data"]) for line in pipeline.output(batch_id)
    ]


def after_dump(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Have that happen between the state and the copying of the objects."""
    real = take.dump

    def dump(*given: Any) -> None:
        real(*given)
        do()

    monkeypatch.setattr(take, "dump", dump)


def input_key(pipeline: Pipeline, batch_id: UUID) -> str:
    with pipeline.resources.database.transaction() as transaction:
        return transaction.execute(
            select(File.storage_key)
            .join(Batch, Batch.input_file_id == File.id)
            .where(Batch.id == batch_id)
        ).scalar_one()


def part_keys(pipeline: Pipeline, batch_id: UUID) -> list[str]:
    with pipeline.resources.database.transaction() as transaction:
        return list(transaction.scalars(select(Part.storage_key).where(Part.batch_id == batch_id)))


def test_batches_of_every_phase_go_on_from_a_backup_although_the_service_went_on_during_it(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the dump and the copying every batch ends, its parts are to be removed, an upload is
    cancelled and a file deleted: of the moment of the dump, nothing may be missing."""
    batches = in_every_phase(pipeline)
    upload = begun(pipeline)

    def go_on() -> None:
        for _ in range(3):
            pipeline.skip_waits()
            pipeline.validate()
            pipeline.plan()
            pipeline.drain()
            pipeline.assemble()
            pipeline.clean()
        with pipeline.resources.database.transaction() as transaction:
            now = session.now(transaction)
            held = uploads.hold(transaction, pipeline.project_id, upload.id)
            assert held is not None
            uploads.cancel(transaction, held, now)
            batch = transaction.get_one(Batch, batches["completed"])
            assert batch.output_file_id is not None
            files.mark_deleted(transaction, pipeline.project_id, batch.output_file_id, now)
        leftovers.sweep_all(pipeline.resources)

    after_dump(monkeypatch, go_on)
    manifest = backed_up(pipeline, tmp_path / "backup")
    assert manifest.missing == 0
    assert {pipeline.batch(each).status for each in batches.values()} <= TERMINAL

    with filled(pipeline, tmp_path / "backup") as elsewhere:
        found = {name: elsewhere.batch(each).status for name, each in batches.items()}
        assert found["half drained"] is BatchStatus.IN_PROGRESS
        assert found["drained"] is BatchStatus.FINALIZING
        elsewhere.lose_workers()
        for batch_id in batches.values():
            elsewhere.finish(batch_id)
            invariants.check(elsewhere, batch_id)
        # What had been answered by the moment of the backup was not run again.
        half = part_keys(elsewhere, batches["half drained"])
        assert set(half) & set(part_keys(pipeline, batches["half drained"]))
        there = {name: answers(elsewhere, each) for name, each in batches.items()}

    # Here, what had to wait for the backup is removed after it.
    leftovers.sweep_all(pipeline.resources)
    for name in set(batches) - {"completed"}:
        pipeline.finish(batches[name])
        invariants.check(pipeline, batches[name])
        assert answers(pipeline, batches[name]) == there[name]


def test_nothing_that_a_row_names_is_removed_while_a_backup_is_made(pipeline: Pipeline) -> None:
    batch_id = submitted(pipeline, "a")
    pipeline.validate()
    pipeline.plan()
    pipeline.drain()
    pipeline.assemble()
    keys = part_keys(pipeline, batch_id)
    storage = pipeline.resources.storage
    file = input_key(pipeline, batch_id)
    with pipeline.resources.database.transaction() as transaction:
        now = session.now(transaction)
        row = transaction.get_one(Batch, batch_id)
        files.mark_deleted(transaction, pipeline.project_id, row.input_file_id, now)

    with removals.held_off(pipeline.resources.database.engine):
        pipeline.clean()
        leftovers.sweep_all(pipeline.resources)
        assert all(storage.size(key) for key in [file, *keys])

    pipeline.clean()
    leftovers.sweep_all(pipeline.resources)
    for key in [file, *keys]:
        with pytest.raises(MissingObject):
            storage.size(key)


def test_a_backup_waits_for_removals_that_are_under_way(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "PATIENCE_S", 1)
    engine = pipeline.resources.database.engine
    with removals.allowed(engine) as may:
        assert may
        with pytest.raises(Exception, match="lock timeout"), removals.held_off(engine):
            pytest.fail("it did not wait")
    with removals.held_off(engine), removals.allowed(engine) as may:
        assert not may


def test_what_the_store_lacks_is_told_by_the_backup_and_by_the_restoring(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    lost, kept = submitted(pipeline, "lost"), submitted(pipeline, "kept")
    pipeline.resources.storage.delete([input_key(pipeline, lost)])
    pipeline.resources.storage.put(f"files/{'0' * 32}/of-nobody", b"no row names this")

    manifest = backed_up(pipeline, tmp_path / "backup")

    entries = {entry.key: entry for entry in Archive(tmp_path / "backup").entries()}
    assert (manifest.objects, manifest.missing) == (2, 1)
    assert entries[input_key(pipeline, lost)].missing
    assert entries[input_key(pipeline, kept)].sha256
    with filled(pipeline, tmp_path / "backup", absent=1) as elsewhere:
        elsewhere.finish(kept)
        invariants.check(elsewhere, kept)


def test_an_object_of_another_size_than_its_row_says_is_missing(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    batch_id = submitted(pipeline, "a")
    pipeline.resources.storage.put(input_key(pipeline, batch_id), b"cut short")

    assert backed_up(pipeline, tmp_path / "backup").missing == 1


def test_a_backup_of_the_state_alone_lists_what_belongs_to_it(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    batch_id = submitted(pipeline, "a")
    key = input_key(pipeline, batch_id)
    size = pipeline.resources.storage.size(key)

    manifest = backed_up(pipeline, tmp_path / "backup", with_bytes=False)

    assert (manifest.with_bytes, manifest.objects, manifest.bytes) == (False, 1, size)
    assert list(Archive(tmp_path / "backup").entries()) == [Entry(key=key, bytes=size)]
    assert not (tmp_path / "backup" / "objects").exists()
    # Brought back beside a store that has the bytes, it goes on.
    settings = pipeline.resources.settings
    with empty_database(settings.database_url.get_secret_value()) as url:
        elsewhere = settings_elsewhere(settings, url).model_copy(
            update={"s3_bucket": settings.s3_bucket}
        )
        assert fill(elsewhere, Archive(tmp_path / "backup"), quiet) == 0
        with resources_on(pipeline.resources, elsewhere) as resources:
            beside = Pipeline(resources, pipeline.project_id)
            beside.finish(batch_id)
            invariants.check(beside, batch_id)


@pytest.fixture
def whole(pipeline: Pipeline, tmp_path: Path) -> Archive:
    """A good backup with one object in it."""
    submitted(pipeline, "a")
    backed_up(pipeline, tmp_path / "backup")
    archive = Archive(tmp_path / "backup")
    archive.check_whole()
    return archive


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def only_object(archive: Archive) -> Path:
    (entry,) = archive.entries()
    return archive.bytes_of(entry.key)


DAMAGES: dict[str, tuple[Callable[[Archive], object], str]] = {
    "dump changed": (lambda archive: flipped(archive.dump), "state.dump is not what"),
    "dump gone": (lambda archive: archive.dump.unlink(), "state.dump is not what"),
    "object gone": (lambda archive: only_object(archive).unlink(), "missing or not of"),
    "object cut": (lambda archive: only_object(archive).write_bytes(b"x"), "missing or not of"),
    "list cut": (lambda archive: archive.listing.write_text(""), "has 0 objects"),
    "list gone": (lambda archive: archive.listing.unlink(), "damaged"),
    "list is no list": (lambda archive: archive.listing.write_text("{}\n"), "damaged"),
    "key leads out": (
        lambda archive: archive.listing.write_text('{"key": "../../x", "bytes": 1}\n'),
        "no path",
    ),
    "no manifest": (lambda archive: (archive.folder / "manifest.json").unlink(), "is no backup"),
    "another format": (
        lambda archive: (archive.folder / "manifest.json").write_text('{"format": 2}'),
        "format",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_backup_is_refused_before_anything_is_touched(
    whole: Archive, tmp_path: Path, damage: str
) -> None:
    spoil, said = DAMAGES[damage]
    spoil(whole)

    with pytest.raises(BackupError, match=said):
        restore(Home.at(tmp_path / "home"), whole.folder, replace=False, say=quiet)
    assert not (tmp_path / "home").exists()


def test_bytes_that_changed_without_a_trace_are_found_when_they_are_put_back(
    pipeline: Pipeline, whole: Archive
) -> None:
    flipped(only_object(whole))

    whole.check_whole()
    with pytest.raises(BackupError, match="is damaged"):
        list(copy_in(whole, pipeline.resources.storage, whole.entries()))


def test_a_backup_of_newer_tables_says_so(whole: Archive, tmp_path: Path) -> None:
    newer = whole.manifest().model_copy(update={"revision": "9999", "halfrate": "7.0"})
    whole.write_manifest(newer)

    with pytest.raises(BackupError, match=r"newer halfrate \(7.0, tables of revision 9999"):
        restore(Home.at(tmp_path / "home"), whole.folder, replace=False, say=quiet)


def test_only_its_owner_may_read_a_backup_and_no_failed_one_is_left(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise BackupError("pg_dump failed")

    @contextmanager
    def stores(_: Home) -> Iterator[Any]:
        yield pipeline.resources.settings

    monkeypatch.setattr(take, "_stores", stores)
    place = tmp_path / "backups"
    take.take(Home.at(tmp_path), place / "first", with_bytes=True, say=quiet)
    with pytest.raises(BackupError, match="is there already"):
        take.take(Home.at(tmp_path), place / "first", with_bytes=True, say=quiet)
    monkeypatch.setattr(take, "dump", fails)
    with pytest.raises(BackupError, match="pg_dump failed"):
        take.take(Home.at(tmp_path), place / "second", with_bytes=True, say=quiet)

    assert list(place.iterdir()) == [place / "first"]
    assert (place / "first").stat().st_mode & 0o777 == 0o700
