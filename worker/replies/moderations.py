"""What does an answered line of /v1/moderations hold? The reference's ModerationCreateResponse."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.request import Classification
from service.catalog import Category
from service.ids import new_id
from worker.readings import Moderate
from worker.replies.usage import Reply, Usage, encoded


def moderations(
    prompt: Moderate, results: Sequence[Classification], labels: Sequence[str]
) -> Reply:
    """One result a text. The reference tells no usage; it is told where texts may be cut."""
    body = {
        "id": f"modr-{new_id().hex}",
        "model": prompt.body.model,
        "results": [_result(prompt, result, labels) for result in results],
    }
    reply = encoded(body, prompt.readings, truncate=prompt.body.truncate)
    return reply if prompt.body.truncate else Reply(body, Usage(reply.usage.taken))


def _result(prompt: Moderate, result: Classification, labels: Sequence[str]) -> dict[str, Any]:
    """A category that no label is mapped on is never flagged, and applies to no input."""
    mapping = prompt.mapping
    scores = dict.fromkeys(Category, np.float32(0))
    mapped = set(mapping.labels.values())
    for label, score in zip(labels, result.scores, strict=True):
        category = mapping.labels.get(label)
        if category is not None:
            scores[category] = max(scores[category], score)
    flags = {
        category: category in mapped
        and bool(score >= mapping.thresholds.get(category, mapping.threshold))
        for category, score in scores.items()
    }
    return {
        "flagged": any(flags.values()),
        # The keys as plain strings: what writes JSON takes no others.
        "categories": {category.value: flag for category, flag in flags.items()},
        "category_scores": {category.value: score for category, score in scores.items()},
        "category_applied_input_types": {
            category.value: ["text"] if category in mapped else [] for category in Category
        },
    }
