"""Which models are served, and what happens to a live call?"""

from typing import NoReturn

from fastapi import APIRouter, Request

from service import view
from service.api.auth import Reader
from service.api.deps import Needs
from service.api.errors import documented
from service.errors import BatchOnly, NotFound
from service.wire import ModelList, ModelObject

LIVE_CALLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
)

router = APIRouter(tags=["Models"])


@router.get("/v1/models", responses=documented())
def list_models(_caller: Reader, parts: Needs) -> ModelList:
    """All served models."""
    return ModelList(object="list", data=[view.model_object(m) for m in parts.catalog.models])


@router.get("/v1/models/{model_id}", responses=documented(404))
def retrieve_model(model_id: str, _caller: Reader, parts: Needs) -> ModelObject:
    """One model."""
    model = parts.catalog.get(model_id)
    if model is None:
        raise NotFound(
            f"The model '{model_id[:64]}' does not exist.", param="model", code="model_not_found"
        )
    return view.model_object(model)


def _live(request: Request, _caller: Reader) -> NoReturn:
    """Answered with 404 `batch_only`: this service runs lines of batches."""
    path = request.url.path
    raise BatchOnly(
        f"{path} is served in batches only. Write one request a line into a .jsonl file"
        f' ({{"custom_id", "method": "POST", "url": "{path}", "body"}}), upload it by POST'
        " /v1/files with purpose 'batch', then POST /v1/batches with its input_file_id, endpoint"
        f" '{path}' and completion_window '24h'."
    )


for _path in LIVE_CALLS:
    router.add_api_route(
        _path,
        _live,
        methods=["POST"],
        name=f"live call {_path}",
        response_model=None,
        responses=documented(404),
        tags=["Live calls"],
    )
