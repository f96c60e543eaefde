"""What lives in an engine worker process? Its models, their loops, one keeper for all leases."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import structlog

from service.catalog import Model
from service.clock import monotonic
from service.db import session, workers
from worker.drain import Drain, Places
from worker.engine_loop import EngineLoop
from worker.engines import engine_of
from worker.execute import ModelOnLoop
from worker.lease import Keeper
from worker.resources import Resources
from worker.tokenizers import tokenizer_of
from worker.watchdog import Watchdog

log = structlog.get_logger()


class EngineProcess:
    """Drains of every served model. Built by `serving`, which loads the models first."""

    def __init__(
        self, drains: dict[str, Drain], stopping: threading.Event, beat: Callable[[], None]
    ) -> None:
        self._drains = drains
        self._stopping = stopping
        self.beat = beat

    def drain(self, model_id: str) -> None:
        """Run what there is for that model; a model that is not served here is passed over."""
        drain = self._drains.get(model_id)
        if drain is None:
            log.warning("woken for a model not served here", model=model_id)
            return
        drain.run()

    def stop(self) -> None:
        """Shards under way flush what is finished and hand back the rest."""
        self._stopping.set()


@contextmanager
def serving(resources: Resources) -> Iterator[EngineProcess]:
    """Load the models, register the worker, renew and beat until the block is left."""
    served = _served(resources)
    names = [model.id for model in served]
    stopping = threading.Event()
    with ExitStack() as stack:
        loaded = {model.id: _load(stack, resources, model) for model in served}
        beat = partial(_beat, resources, loaded)
        keeper = stack.enter_context(
            Keeper(
                resources.database,
                lease=resources.settings.lease,
                every_s=resources.settings.renew_s,
                also=beat,
            )
        )
        watched = {f"engine {name}": on.loop.doing for name, on in loaded.items()}
        watched["leases"] = keeper.doing
        stack.enter_context(Watchdog(watched, limit_s=resources.worker_settings.step_limit_s))
        places = Places()
        drains = {
            name: Drain(resources, on, keeper, places, stopping=stopping.is_set, clock=monotonic)
            for name, on in loaded.items()
        }
        beat()
        log.info("engine worker ready", models=names, pid=os.getpid())
        try:
            yield EngineProcess(drains, stopping, beat)
        finally:
            stopping.set()
            with resources.database.transaction() as transaction:
                workers.leave(transaction, resources.name)


def _served(resources: Resources) -> list[Model]:
    wanted = resources.worker_settings.serve or tuple(
        model.id for model in resources.catalog.models
    )
    models = []
    for name in wanted:
        model = resources.catalog.get(name)
        if model is None:
            raise UnknownModel(name)
        models.append(model)
    return models


class UnknownModel(Exception):
    """HALFRATE_SERVE names a model that models.toml does not."""

    def __init__(self, name: str) -> None:
        super().__init__(f"HALFRATE_SERVE names '{name}', which the catalog does not hold")


def _load(stack: ExitStack, resources: Resources, model: Model) -> ModelOnLoop:
    models_dir = resources.settings.models
    loop = stack.enter_context(
        EngineLoop(
            partial(engine_of, model, models_dir, resources.worker_settings),
            clock=monotonic,
            name=model.id,
        )
    )
    log.info("model loaded", model=model.id)
    return ModelOnLoop(model=model, tokenizer=tokenizer_of(model, models_dir), loop=loop)


def _beat(resources: Resources, loaded: dict[str, ModelOnLoop]) -> None:
    speeds = {name: on.loop.speed() for name, on in loaded.items()}
    figures = {name: on.loop.figures() for name, on in loaded.items()}
    with resources.database.transaction() as transaction:
        now = session.now(transaction)
        workers.beat(transaction, resources.name, figures, now)
        for name, speed in speeds.items():
            if speed is not None:
                workers.measure(transaction, name, speed, now)
