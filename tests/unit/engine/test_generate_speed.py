"""Does the programme that measures how fast a device generates count right, and run?"""

import json

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.gpu import generate_speed
from tests.gpu.generate_speed import Costs

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_it_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    generate_speed.main(["--device", "cpu", "--shape", "tiny"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["path"] == "packed"
    for count in (1, 4, 8):
        # Eight tokens of each: one from the prompt, one in a step that does not count.
        assert report[f"decode_{count}"]["steps"] == 6
        assert report[f"decode_{count}"]["share_of_copy"] > 0
    assert report["ratio"]["sequences"] == 4
    assert report["prefill"]["share_of_product"] > 0


def test_operations_and_bytes_are_those_of_the_model() -> None:
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.LlamaForCausalLM(config).eval()
    costs = Costs.of(config, "bfloat16")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        model(input_ids=torch.arange(1)[None], logits_to_keep=1)
    assert counted.get_total_flops() == costs.operations_of_prompt(1)
    # Beyond one token the model computes all pairs, and half of them are hidden.
    pairs = 4 * 2 * 4 * config.head_dim
    assert costs.operations_of_prompt(3) == 3 * 2 * costs.weights + 2 * costs.head + 6 * pairs
    norms = (2 * 2 + 1) * 32
    weights = sum(parameter.numel() for parameter in model.parameters()) - norms - 64 * 32
    kept = 2 * 2 * 2 * config.head_dim
    assert costs.bytes_of_step([5, 7]) == 2 * (weights + 12 * kept)
