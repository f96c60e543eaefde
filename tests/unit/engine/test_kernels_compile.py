"""Do the kernels become machine code for devices that are not here? By triton's own ptxas.

In a process of its own, since here they are interpreted.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.generate import triton_spans
from engine.generate.rule import Rule
from engine.generate.kv import Heads

NAMES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
ALIGNED = {"query_head", "query_row"}


def shared(function, constants, kinds, capability, **options):
    signature = {name: kinds.get(name, "i32") for name in function.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name in ALIGNED
    }
    source = ASTSource(function, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    return made.metadata.shared


found = []
for capability, dtype, dim, group, rule in json.loads(sys.argv[1]):
    heads = Heads(4, dim, dim)
    rule = Rule(0.1, *rule)
    numbers = NAMES[dtype]
    tables = dict.fromkeys(["readers", "spans", "cells"], "*i64")
    tables |= dict.fromkeys(["query", "keys", "values", "key", "value", "out", "sinks"], numbers)
    tables |= {"scale": "fp32", "softcap": "fp32"}
    for single in (True, False):
        tile = triton_spans.tile_of(group, heads, getattr(torch, dtype), single=single)
        constants = triton_spans.constants(heads, rule, getattr(torch, dtype), tile)
        kinds = tables | {"sums": "*fp32" if single else numbers}
        found.append(
            shared(triton_spans._attend, constants, kinds, capability,
                   num_warps=tile.warps, num_stages=tile.stages)
        )
    names = ["VALUE", "VALUES", "SINKS", "WINDOW", "BLOCK", "SPLIT", "MOST"]
    kinds = tables | {"sums": "*fp32"}
    shared(triton_spans._merge, {name: constants[name] for name in names}, kinds, capability)
    constants = {"HEADS": 4, "KEY": dim, "VALUE": dim, "WIDTH": 256}
    shared(triton_spans._write, constants, tables, capability)
print(json.dumps(found))
"""
PLAIN, ALL = (None, None, None), (9, 5.0, "sinks")


@pytest.mark.parametrize(
    ("capability", "most"), [(80, 99 << 10), (90, 227 << 10)], ids=["ampere", "hopper"]
)
def test_kernels_become_machine_code_that_fits(tmp_path: Path, capability: int, most: int) -> None:
    cases = [
        (capability, dtype, dim, group, rule)
        for dtype, dim, group, rule in [
            ("bfloat16", 64, 4, PLAIN),
            ("bfloat16", 128, 8, ALL),
            ("float32", 256, 71, ALL),
        ]
    ]
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env={"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    shared = json.loads(made.stdout)
    assert len(shared) == 2 * len(cases)
    assert max(shared) <= most
