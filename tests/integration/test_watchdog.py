"""Does a hung engine end its worker, a real process, and cost no line but the one that hangs it?"""

import os
import subprocess
import sys

from service.batch import BatchStatus
from tests import invariants
from tests.pipeline import Pipeline, embedding_line

HUNG = 1
MOST_STARTS = 9


def worker(pipeline: Pipeline) -> subprocess.CompletedProcess[str]:
    """One life of an engine worker."""
    settings = pipeline.resources.settings
    secrets = ("database_url", "redis_url", "s3_access_key_id", "s3_secret_access_key")
    variables = {name: getattr(settings, name).get_secret_value() for name in secrets} | {
        name: str(getattr(settings, name))
        for name in ("home", "models", "catalog", "s3_endpoint_url", "s3_bucket", "flush_s")
    }
    environment = {f"HALFRATE_{name.upper()}": value for name, value in variables.items()}
    environment |= {"HALFRATE_SERVE": "stub-embed", "HALFRATE_STEP_LIMIT_S": "0.4"}
    return subprocess.run(
        [sys.executable, "-m", "tests.hanging_worker"],
        env={**os.environ, **environment},  # noqa: TID251 - handed on
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def hung(life: subprocess.CompletedProcess[str]) -> bool:
    """Whether it was ended by the watchdog, which says where the thread stood."""
    told = life.stdout + life.stderr
    return life.returncode == HUNG and "hanging_worker.py" in told


def test_a_line_that_hangs_the_engine_ends_alone(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("good"), embedding_line("bad", "hang")])
    pipeline.validate()
    pipeline.plan()
    lives = [worker(pipeline)]
    while lives[-1].returncode and len(lives) < MOST_STARTS:
        assert hung(lives[-1]), lives[-1].stderr
        assert "no progress for too long" in lives[-1].stdout + lives[-1].stderr
        pipeline.lose_workers()
        pipeline.skip_waits()
        lives.append(worker(pipeline))
    assert lives[-1].returncode == 0
    assert len(lives) > 2
    pipeline.assemble()
    pipeline.clean()
    batch = invariants.check(pipeline, batch_id)
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 1, 1)
    (refused,) = pipeline.errors(batch_id)
    assert refused["custom_id"] == "bad"
    assert refused["response"]["body"]["error"]["code"] == "worker_crash"


def test_a_step_that_keeps_the_interpreter_to_itself_ends_the_worker_too(
    pipeline: Pipeline,
) -> None:
    pipeline.submit([embedding_line("bad", "hang hard")])
    pipeline.validate()
    pipeline.plan()
    life = worker(pipeline)
    assert hung(life), life.stderr
    assert "no progress for too long" not in life.stdout + life.stderr
