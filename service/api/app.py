"""What is the API made of, and how does a server process start it?"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from fastapi import FastAPI

from service import clock, logs
from service.api import batches, files, health, metrics, models, uploads, webhooks
from service.api.deps import Parts
from service.api.document import document
from service.api.envelope import Envelope
from service.api.errors import HANDLERS
from service.api.rate import RateLimiter
from service.catalog import Catalog
from service.db.session import Database
from service.outbound import Sender
from service.settings import Settings
from service.storage import Storage
from service.wake import Waker

DESCRIPTION = (
    "Offline batch inference. Upload a JSONL file, create a batch, poll it, download the results."
)


def create_app(
    settings: Settings,
    *,
    database: Database,
    storage: Storage,
    waker: Waker,
    catalog: Catalog,
    at_exit: Callable[[], None] | None = None,
) -> Envelope:
    """The ASGI app over parts that the caller has made; `at_exit` is called when serving ends."""

    limiter = _limiter(settings)
    sender = Sender.open(private_addresses=settings.webhook_private_addresses)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        if limiter is not None:
            limiter.close()
        if at_exit is not None:
            at_exit()

    app = FastAPI(
        title="halfrate",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        redirect_slashes=False,
        # Their pages load scripts from elsewhere. The document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    uploads_at_once = CapacityLimiter(settings.max_uploads)
    app.state.parts = Parts(
        settings, database, storage, waker, catalog, limiter, sender, uploads_at_once
    )
    for module in (files, uploads, batches, webhooks, models, health, metrics):
        app.include_router(module.router)
    made = document(app)
    app.openapi = lambda: made  # type: ignore[method-assign] # FastAPI's own documented way
    return Envelope(app, clock=clock.monotonic, max_requests=settings.max_requests)


def _limiter(settings: Settings) -> RateLimiter | None:
    if settings.requests_per_minute is None:
        return None
    return RateLimiter(
        settings.redis_url.get_secret_value(),
        per_minute=settings.requests_per_minute,
        clock=clock.monotonic,
    )


def app_from_environment() -> Envelope:
    """For `uvicorn --factory`: settings from the environment, read once."""
    settings = Settings()
    logs.configure(settings.log_level)
    database = Database(
        settings.database_url.get_secret_value(),
        pool=settings.database_pool,
        application="halfrate-api",
    )
    storage = Storage.from_settings(settings)
    waker = Waker(settings.redis_url.get_secret_value())

    def close() -> None:
        waker.close()
        storage.close()
        database.close()

    return create_app(
        settings,
        database=database,
        storage=storage,
        waker=waker,
        catalog=Catalog.load(settings.catalog),
        at_exit=close,
    )
