"""What do tests of the stages stand on? A worker's resources, and a project with a pipeline."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from service.db import session
from service.db.models import Project
from service.ids import new_id
from service.settings import Settings
from service.storage import Storage
from tests.pipeline import Pipeline
from worker.resources import Resources, worker_name
from worker.settings import WorkerSettings


@pytest.fixture
def resources(settings: Settings, storage: Storage) -> Iterator[Resources]:
    """What a worker process holds."""
    name = worker_name(os.getpid())
    with closing(Resources.open(settings, WorkerSettings(), name=name)) as opened:
        yield opened


@pytest.fixture
def pipeline(resources: Resources) -> Pipeline:
    """A project with a pipeline of its own."""
    project_id = new_id()
    with resources.database.transaction() as transaction:
        now = session.now(transaction)
        transaction.add(Project(id=project_id, name="test", created_at=now))
    return Pipeline(resources, project_id)
