"""Which engine runs a model of the catalog? Imports torch: for engine workers only."""

from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig, Kind, Quantize
from engine.engine import Engine
from engine.errors import ModelLoadError
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
        deterministic=model.deterministic,
    )
    if settings.token_budget is not None:
        config = replace(config, token_budget=settings.token_budget)
    engine: EngineLike = (
        StubEngine(config) if isinstance(model.origin, StubSource) else Engine(config)
    )
    _check_moderation(model, engine)
    return engine


def _check_moderation(model: Model, engine: EngineLike) -> None:
    """Raises ModelLoadError where the catalog maps labels that the model does not have."""
    mapped = set() if model.moderation is None else set(model.moderation.labels)
    unknown = sorted(mapped - set(engine.labels))
    if unknown:
        msg = (
            f"{model.id}: no label {unknown[0]!r} to moderate by; it has {', '.join(engine.labels)}"
        )
        raise ModelLoadError(msg)
