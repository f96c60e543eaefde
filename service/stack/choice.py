"""Which parts would `up` start? Those not brought by URL, and ours, an engine worker a model."""

from collections.abc import Sequence

from service.catalog import Catalog, CatalogError, Model
from service.settings import Files, PartUrls
from service.stack.part import StackError

EMBEDDED = ("postgres", "valkey", "seaweedfs")
OWN = ("api", "cpu", "beat")


def part_names(models: Sequence[Model]) -> list[str]:
    """Every part that `up` would start in this environment, as `status` lists them."""
    brought = brought_parts()
    embedded = [name for name in EMBEDDED if name not in brought]
    return [*embedded, *OWN, *(engine_name(model.id) for model in models)]


def engine_name(model: str) -> str:
    """The name of the part that serves a model."""
    return f"engine.{model}"


def brought_parts() -> set[str]:
    """Embedded parts that the user brings by URL."""
    urls = PartUrls()
    given = {
        "postgres": urls.database_url,
        "valkey": urls.redis_url,
        "seaweedfs": urls.s3_endpoint_url,
    }
    return {name for name, url in given.items() if url is not None}


def served_models(files: Files, serve: Sequence[str] = ()) -> list[Model]:
    """The models to start engine workers for, in the catalog's order.

    Raises:
        StackError: the catalog cannot be used, or `serve` names a model that it lacks.
    """
    try:
        catalog = Catalog.load(files.catalog)
    except CatalogError as error:
        raise StackError(str(error)) from error
    known = [model.id for model in catalog.models]
    unknown = [model for model in serve if model not in known]
    if unknown:
        raise StackError(f"No model {unknown[0]!r} in {files.catalog}; it has: {', '.join(known)}.")
    return [model for model in catalog.models if not serve or model.id in serve]
