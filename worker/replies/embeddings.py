"""What does an answered line of /v1/embeddings hold? The reference's CreateEmbeddingResponse."""

import base64
from collections.abc import Sequence

from engine.request import Embedding
from worker.readings import Embed
from worker.replies.usage import Reply, encoded


def embeddings(prompt: Embed, vectors: Sequence[Embedding]) -> Reply:
    """One vector an input, in input order."""
    as_text = prompt.body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_text else vector.vector,
        }
        for index, vector in enumerate(vectors)
    ]
    body = {"object": "list", "data": data, "model": prompt.body.model}
    return encoded(body, prompt.readings, truncate=prompt.body.truncate)


def _base64(vector: Embedding) -> str:
    return base64.b64encode(vector.vector.astype("<f4").tobytes()).decode("ascii")
