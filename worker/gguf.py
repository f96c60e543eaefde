"""How does a GGUF file become a model folder in transformers' layout?

Needs the packages gguf and accelerate beside transformers.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, target: Path) -> None:
    """Write `target`: safetensors in float32, config, generation config, tokenizer, chat template.

    Raises what transformers raises for a file it cannot read.
    """
    place = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **place,
    )
    # A model that came from GGUF refuses save_pretrained, even with all weights unpacked. So the
    # same class is built anew from a config that knows nothing of GGUF, and given the weights.
    config = AutoConfig.from_pretrained(gguf.parent, **place)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **place).save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, but other users may share the cache
