"""How fast does sentence-transformers encode the same texts? Asked by `run.py`, over pipes.

Runs in the peers' environment: python peer.py MODEL_FOLDER TEXTS.json VECTORS.npy. For each line of
input, a batch size, it encodes all texts and prints a JSON line with the seconds.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer


def main() -> None:
    """Load, begin warm, answer each batch size; the first one's vectors are kept."""
    folder, texts_file, vectors_file = (Path(argument) for argument in sys.argv[1:])
    texts = json.loads(texts_file.read_text(encoding="utf-8"))
    model = SentenceTransformer(str(folder), device="cpu")
    model.encode(texts[:64], batch_size=32)
    versions = {"sentence_transformers": sentence_transformers.__version__}
    print(json.dumps({**versions, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        vectors = model.encode(texts, batch_size=int(line))
        seconds = time.perf_counter() - begun
        if not vectors_file.exists():
            np.save(vectors_file, vectors)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
