"""How fast does transformers' own `generate` answer the same lines, in sorted static batches?

    python peer_static.py TOLD.json THREADS MODEL_FOLDER BATCH

Asked by `run.py`. Prints a JSON line.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load, begin warm, answer batch after batch, prompts of like length together."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = told["lines"]
    torch.set_num_threads(int(sys.argv[2]))
    size = int(sys.argv[4])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[3], dtype=torch.float32).eval()
    order = sorted(range(len(lines)), key=lambda n: -len(lines[n]["prompt"]))
    answers: list[list[int]] = [[] for _ in lines]

    def run(batch: list[int]) -> None:
        width = max(len(lines[n]["prompt"]) for n in batch)
        padding = [width - len(lines[n]["prompt"]) for n in batch]
        ids = [[0] * pad + lines[n]["prompt"] for n, pad in zip(batch, padding, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        output = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=max(lines[n]["max_tokens"] for n in batch),
            eos_token_id=lines[0]["eos_id"],
            pad_token_id=lines[0]["eos_id"],
        )
        for n, row in zip(batch, output[:, width:].tolist(), strict=True):
            answer = row[: lines[n]["max_tokens"]]
            end = answer.index(lines[n]["eos_id"]) + 1 if lines[n]["eos_id"] in answer else None
            answers[n] = answer[:end]

    run(order[-2:])
    begun, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(order), size):
        run(order[start : start + size])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    version = transformers.__version__
    print(json.dumps({"seconds": seconds, "cpu": cpu, "answers": answers, "version": version}))


if __name__ == "__main__":
    main()
