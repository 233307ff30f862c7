"""What tests of several kernels share."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

CHAIN = [4096, 6144, 4096, 4096, 14336, 4096, 1024] * 6  # widths of x, y, ... of products that feed each other

Product = Callable[[Tensor, Any], Tensor]

# Compiles jobs for Hopper (sm_90) without a GPU, and prints the shared memory that each takes.
COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from importlib import import_module

def ordered(ptx, early, reads_first):
    # A kernel that starts early waits before all that it reads and writes; any other lets none start.
    if not early:
        return "griddepcontrol" not in ptx
    accesses = re.finditer(r"\\b(ld|st)(\\.volatile)?\\.global", ptx)
    places = [access.start() for access in accesses if access[1] == "st" or not reads_first]
    started = ptx.find("griddepcontrol.launch_dependents")
    return 0 < started < ptx.find("griddepcontrol.wait") < min(places)


ALIGNED = [["tt.divisibility", 16]]
shared = {}
for name, job in json.loads(sys.stdin.read()).items():
    kernel = getattr(import_module("ridgeplan.kernels." + job["module"]), job["kernel"])
    signature, constants, hints = {}, {}, {}

    def describe(kind, path, argument):
        if isinstance(kind, list):  # a tuple of arguments
            return tuple(describe(member, (*path, i), argument) for i, member in enumerate(kind))
        if kind == "constexpr":
            constants[path] = job["constants"].get(argument)
        elif kind.startswith("*") or "stride" in argument:
            hints[path] = ALIGNED
        return kind

    for i, argument in enumerate(kernel.arg_names):
        signature[argument] = describe(job["types"].get(argument, "constexpr"), (i,), argument)
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=job["options"])
    assert compiled.asm["cubin"], name
    # A norm's weight is constant, so it may be read while other kernels still run.
    reads_first = job["kernel"] == "_add_rms_norm_kernel"
    assert ordered(compiled.asm["ptx"], job["constants"].get("PDL", False), reads_first), name
    shared[name] = compiled.metadata.shared
print(json.dumps(shared))
"""


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once() -> Iterator[None]:
    """Triton's interpreter replaces its language's functions at each launch, and at each call of a device function.

    It then lists all of the language, which takes longer than most calls. Here, once per launch and module.
    """
    if sys.platform != "linux":  # Triton's wheels are for Linux
        yield
        return
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set[int]()

    def replace_once(function: Callable[..., Any]) -> Any:
        module, is_launch = id(function.__globals__), not replaced
        if module in replaced:
            return None
        replaced.add(module)
        scope = replace(function)
        if is_launch:  # calls of device functions leave it to their kernel's launch to restore the language
            restore = scope.restore
            scope.restore = lambda: (restore(), replaced.clear())
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield


@dataclass
class Launches:
    """CUDA launches that were asked for: kernel, grid, threads, arguments, shared memory, whether early."""

    asked: list[tuple[str, tuple[int, ...], int, ctypes.Structure, int, bool]] = field(default_factory=list)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: ctypes.Structure,
        shared_bytes: int = 0,
        *,
        early: bool = True,
    ) -> None:
        assert block[1:] == (1, 1)
        self.asked.append((kernel, grid, block[0], params, shared_bytes, early))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Notes what a CUDA kernel would be launched with, without a GPU: tensors of the test lie on the CPU."""
    noted = Launches()
    for module in (
        "attention", "experts", "kv_cache", "linear", "sampling", "selection", "sparse_attention",
    ):  # fmt: skip
        monkeypatch.setattr(f"ridgeplan.kernels.{module}.cuda.launch_with_pdl", noted.launch)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return noted


@pytest.fixture
def chained() -> Callable[[Product, Callable[[int, int], Any], int], None]:
    """Products x -> y -> x -> ... of several shapes, back to back in one graph, against one at a time on the GPU."""

    def check(product: Product, make_weight: Callable[[int, int], Any], rows: int) -> None:
        weights = [make_weight(outputs, inputs) for inputs, outputs in zip(CHAIN, CHAIN[1:] + CHAIN[:1], strict=True)]
        first = torch.randn(rows, CHAIN[0], device="cuda", dtype=torch.bfloat16)
        _results(product, weights, first, synchronize=True)  # compiles outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = _results(product, weights, first, synchronize=False)
        for _ in range(20):
            first.normal_()
            graph.replay()
            torch.cuda.synchronize()
            expected = _results(product, weights, first, synchronize=True)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    return check


def _results(product: Product, weights: Sequence[Any], first: Tensor, synchronize: bool) -> list[Tensor]:
    results = [first]
    for weight in weights:
        results.append(product(results[-1], weight))
        if synchronize:
            torch.cuda.synchronize()
    return results


@pytest.fixture(scope="session")
def compiled_for_hopper() -> Callable[[dict[str, Any]], dict[str, int]]:
    """Compiles kernels on a machine without a GPU: jobs by name -> bytes of shared memory by name.

    A job has a module, a kernel, types and constants of its arguments (others are None), and options.
    """

    def compile_all(jobs: dict[str, Any]) -> dict[str, int]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        shared: dict[str, int] = json.loads(done.stdout)
        assert shared.keys() == jobs.keys()
        return shared

    return compile_all
