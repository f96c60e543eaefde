"""How does a test make an object of a project, whatever kind a route is about?"""

from collections.abc import Callable

import httpx


def file(http: httpx.Client) -> str:
    form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    return _made(http.post("/v1/files", **form))


def _batch(http: httpx.Client) -> str:
    body = {
        "input_file_id": file(http),
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    return _made(http.post("/v1/batches", json=body))


def _upload(http: httpx.Client) -> str:
    body = {
        "bytes": 3,
        "filename": "a.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "batch",
    }
    return _made(http.post("/v1/uploads", json=body))


def _endpoint(http: httpx.Client) -> str:
    body = {
        "name": "a",
        "url": "https://1.1.1.1/",
        "event_types": ["batch.completed"],
    }
    return _made(http.post("/v1/webhook_endpoints", json=body))


MAKERS: dict[str, Callable[[httpx.Client], str]] = {
    "file_id": file,
    "batch_id": _batch,
    "upload_id": _upload,
    "webhook_endpoint_id": _endpoint,
}
"""How an object of a project is made, by the name of the path's parameter that names it."""


def _made(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    object_id: str = answer.json()["id"]
    return object_id
