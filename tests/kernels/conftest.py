"""What tests of several kernels share."""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

CHAIN = [4096, 6144, 4096, 4096, 14336, 4096, 1024] * 6  # widths of x, y, ... of products that feed each other

Product = Callable[[Tensor, Any], Tensor]


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
        "attention.cuda", "kv_cache.quantize_cuda", "linear.cuda_launch", "sampling.top_k_top_p_cuda",
        "sparse_attention.progressive_cuda",
    ):  # fmt: skip
        monkeypatch.setattr(f"ridgeplan.kernels.{module}.launch_with_pdl", noted.launch)
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
    found = [first]
    for weight in weights:
        found.append(product(found[-1], weight))
        if synchronize:
            torch.cuda.synchronize()
    return found
