"""What does the OpenAPI document say? What the service does, no more and no less."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.wire import CreateBatch

REF = "#/components/schemas/{model}"
NOT_OURS = ("HTTPValidationError", "ValidationError")


def document(app: FastAPI) -> dict[str, Any]:
    """The document of the app's routes.

    The framework would add a 422 to each, which this service never answers, and leave out the
    bodies that it does not read itself.
    """
    made = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path in made["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = made["components"]["schemas"]
    for name in NOT_OURS:
        schemas.pop(name, None)
    _, bodies = models_json_schema([(CreateBatch, "validation")], ref_template=REF)
    schemas.update(bodies["$defs"])
    return made
