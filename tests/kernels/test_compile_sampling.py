"""The sampling kernels compile for Hopper (sm_90) on a machine without a GPU, tuples of drafts included.

All start early, and so touch no memory before they wait (device/launch.py).
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from importlib import import_module

def frozen(kind):
    return tuple(map(frozen, kind)) if isinstance(kind, list) else kind

for name, job in json.loads(sys.stdin.read()).items():
    kernel = getattr(import_module("ridgeplan.kernels." + job["module"]), job["kernel"])
    kinds = {argument: frozen(job["types"].get(argument, "constexpr")) for argument in kernel.arg_names}
    constants = {(i,): job["constants"][a] for i, a in enumerate(kernel.arg_names) if kinds[a] == "constexpr"}
    source = ASTSource(kernel, kinds, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"], name
    ptx = compiled.asm["ptx"]
    first = min(ptx.find(access) for access in ("ld.global", "st.global"))
    assert 0 < ptx.find("griddepcontrol.launch_dependents") < ptx.find("griddepcontrol.wait") < first, name
    print(name)
"""

FIGURES = ["*fp32", "*fp32", "*fp32"]  # peak, cutoff and mass
SIZES = {"CHUNKS": 32, "PADDED": 32, "CHUNK": 4096, "FILTERED": True, "PDL": True}
ROW = {"vocab": "i32", "scale": "fp32", "draft_scale": "fp32"}
FILTERING = dict.fromkeys(("cutoffs", "peaks", "masses", "peak", "cutoff", "mass"), "*fp32") | ROW


def job(module: str, kernel: str, types: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    return {"module": module, "kernel": kernel, "types": types, "constants": SIZES | constants}


def rounds(element: str, gamma: int) -> dict[str, dict[str, Any]]:
    """Kernels that verify `gamma` drafts, or of a draw where there are none."""
    types: dict[str, Any] = {"target": ["*" + element, *FIGURES], "uniform": "*fp64", "sums": "*i64", "out": "*i64"}
    types |= {"draft": [[kind] * gamma for kind in types["target"]]} | ROW
    constants: dict[str, Any] = {"GAMMA": gamma}
    if gamma:
        types |= {"drafted": "*i64", "counts": "*i64", "max_tokens": "*i32"}
    else:
        constants |= {"drafted": None, "counts": None}
    kernels = ["_accept_kernel"] * (gamma > 0) + ["_weigh_kernel", "_pick_kernel"]
    return {f"{kernel} {element} {gamma}": job("sampling.triton", kernel, types, constants) for kernel in kernels}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_every_sampling_kernel_compiles_for_hopper() -> None:
    greedy = {
        "logits": "*bf16",
        "places": "*i32",
        "best": "*i64",
        "drafted": "*i64",
        "counts": "*i64",
        "max_tokens": "*i32",
    }
    jobs = {
        "softmax": job("sampling.triton", "_softmax_kernel", FILTERING | {"logits": "*bf16"}, {}),
        "join": job("sampling.triton", "_join_kernel", FILTERING, {"FILTERED": False}),
        "best": job("sampling.triton", "_best_kernel", FILTERING | greedy, {}),
        "join best": job("sampling.triton", "_join_best_kernel", FILTERING | greedy, {}),
        "agree": job("sampling.triton", "_agree_kernel", FILTERING | greedy, {"GAMMA": 7, "PADDED": 8}),
        **rounds("bf16", 8),
        **rounds("fp32", 0),
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == list(jobs)
