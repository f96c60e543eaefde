"""Which engine runs a model of the catalog? Imports torch: for engine workers only."""

from pathlib import Path

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.stub import StubEngine
from engine.surface import EngineLike
from service.catalog import Model, StubSource
from worker.models import pull
from worker.settings import WorkerSettings


def engine_of(model: Model, models_dir: Path, settings: WorkerSettings) -> EngineLike:
    """The model, loaded on its device. Raises ModelLoadError or ModelPullError."""
    config = EngineConfig(
        model=pull(model, models_dir),
        kind=Kind(model.kind),
        device=settings.device,
        dtype=model.dtype,
        context_length=model.context_length,
        threads=settings.threads,
        pooling=model.pooling,
        dimensions=model.dimensions,
        quantize=None if model.quantize is None else Quantize(model.quantize),
        **({} if settings.token_budget is None else {"token_budget": settings.token_budget}),
    )
    return StubEngine(config) if isinstance(model.origin, StubSource) else Engine(config)
