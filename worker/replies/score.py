"""What does an answered line of /v1/score or /v1/rerank hold? vLLM's, Cohere's and Jina's objects.

A model that reads pairs scores them itself; of an embedding model the score is the cosine.
"""

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from engine.request import Classification, Embedding
from service.bodies.score import RerankBody, ScoreBody
from service.ids import new_id
from worker.readings import Compare, Pairs
from worker.replies.cosine import directions
from worker.replies.usage import Reply, encoded


def scored(prompt: Pairs, results: Sequence[Classification], *, created: int) -> Reply:
    """The model's own scores."""
    scores = np.array([result.scores[0] for result in results], dtype=np.float32)
    return _reply(prompt, scores, created)


def compared(prompt: Compare, vectors: Sequence[Embedding], *, created: int) -> Reply:
    """The cosines; one vector of the first side is for all of the second."""
    rows = directions(vectors)
    first, second = rows[: len(prompt.first)], rows[len(prompt.first) :]
    return _reply(prompt, (first * second).sum(axis=-1).astype(np.float32), created)


def _reply(prompt: Pairs | Compare, scores: NDArray[np.float32], created: int) -> Reply:
    match prompt.body:
        case ScoreBody():
            body = _score(prompt.body, scores, created)
        case RerankBody():
            body = _rerank(prompt.body, scores)
        case unreachable:
            assert_never(unreachable)
    return encoded(body, prompt.readings, truncate=prompt.body.truncate)


def _score(asked: ScoreBody, scores: NDArray[np.float32], created: int) -> dict[str, Any]:
    return {
        "id": f"score-{new_id().hex}",
        "object": "list",
        "created": created,
        "model": asked.model,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
    }


def _rerank(asked: RerankBody, scores: NDArray[np.float32]) -> dict[str, Any]:
    """Best first; of equal ones the earlier."""
    ranked = np.argsort(-scores, kind="stable")[: asked.top_n]
    results = []
    for index in ranked.tolist():
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if asked.return_documents:
            result["document"] = {"text": asked.documents[index].text}
        results.append(result)
    return {"id": f"rerank-{new_id().hex}", "model": asked.model, "results": results}
