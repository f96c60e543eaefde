"""How does an engine worker come by a hindered engine? As `halfrate run engine`, but for that.

celery -A tests.e2e.chaos.hindered worker …
"""

from pathlib import Path

import worker.engine_process
from engine.config import EngineConfig, Kind
from service.catalog import Model
from tests.e2e.chaos.engine import HinderedEngine
from worker.settings import WorkerSettings


def _hindered(model: Model, _: Path, __: WorkerSettings) -> HinderedEngine:
    config = EngineConfig(model=Path(), kind=Kind.EMBED, context_length=model.context_length)
    return HinderedEngine(config, Path.cwd() / "control")


worker.engine_process.engine_of = _hindered

from worker.engine_app import app  # noqa: E402 - its engine is chosen above

__all__ = ["app"]
