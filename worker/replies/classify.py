"""What does an answered line of /v1/classify hold where texts, not tokens, are classified?

vLLM's object, and beside it `score`, and on request all `scores` by label and the raw `logits`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.request import Classification, Embedding
from service.bodies.classify import ClassifyBody
from service.ids import new_id
from worker.readings import Classify, ZeroShot
from worker.replies.cosine import directions, of_length_1
from worker.replies.usage import Reply, encoded

SCALE = 20.0
"""Of cosines before their softmax: what sentence-transformers trains embeddings with."""


def classification(
    prompt: Classify, results: Sequence[Classification], labels: Sequence[str], *, created: int
) -> Reply:
    """One entry a text: its best label, and the probability of each."""
    data = [
        _entry(prompt.body, index, labels, probs=result.scores, logits=result.logits)
        for index, result in enumerate(results)
    ]
    body = listed(prompt.body, data, created)
    return encoded(body, prompt.readings, truncate=prompt.body.truncate)


def zero_shot(prompt: ZeroShot, vectors: Sequence[Embedding], *, created: int) -> Reply:
    """One entry a text, compared with the labels of the body.

    A label's vector is the mean of its templates' directions. One label of several: softmax of the
    scaled cosines. Labels each on their own (`multi_label`): the cosine, nothing below 0.
    """
    labels = prompt.body.labels or []
    rows = directions(vectors)
    texts, written = rows[: len(prompt.texts)], rows[len(prompt.texts) :]
    ways = len(written) // len(labels)
    means = written.reshape(len(labels), ways, -1).mean(axis=1)
    cosines = texts @ of_length_1(means).T  # [texts, labels]
    probs = np.clip(cosines, 0, 1) if prompt.body.multi_label else _softmax(SCALE * cosines)
    data = [
        _entry(
            prompt.body,
            index,
            labels,
            probs=probs[index].astype(np.float32),
            logits=cosines[index].astype(np.float32),
        )
        for index in range(len(texts))
    ]
    body = listed(prompt.body, data, created)
    return encoded(body, prompt.readings, truncate=prompt.body.truncate)


def listed(body: ClassifyBody, data: Sequence[Mapping[str, Any]], created: int) -> dict[str, Any]:
    """The object around the entries."""
    return {
        "id": f"classify-{new_id().hex}",
        "object": "list",
        "created": created,
        "model": body.model,
        "data": data,
    }


def _entry(
    body: ClassifyBody,
    index: int,
    labels: Sequence[str],
    *,
    probs: NDArray[np.float32],
    logits: NDArray[np.float32],
) -> dict[str, Any]:
    best = int(probs.argmax())
    entry = {
        "index": index,
        "label": labels[best],
        "probs": probs,
        "num_classes": len(labels),
        "score": probs[best],
    }
    if body.return_all_scores:
        entry["scores"] = dict(zip(labels, probs, strict=True))
    if body.logits:
        entry["logits"] = logits
    return entry


def _softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
