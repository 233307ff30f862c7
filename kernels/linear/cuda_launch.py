"""CUDA C++ kernels of linear layers for few rows, compiled at first use and launched early.

How they work (linear_instructions.cu, linear_int4.cu or linear_dense.cu, linear_roles.cu, linear_kernel.cu). One block
per multiprocessor, all resident at once, share the row tiles (16 outputs) of the weight. In each, one warp streams its
tiles through a ring of bulk copies, some warps multiply, cutting the inputs of every item between them, and one fetches
x into shared memory, adds up sums and stores. Once started they meet at barriers in shared memory, never all at once.
Two blocks fetch x together, each half of the rows for both; where x is too large, a cluster's blocks cut the inputs
instead, send their sums to each other as they come, and add them up at the end.

Kernels of a chain overlap: a block takes all of a multiprocessor, so the next kernel's moves in where one ends, fills
its ring (weights are constant) and only then waits for what comes before. Blocks of half the size, which would move in
earlier, pile up two to a multiprocessor where one has ended, and leave others without.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.launch import Configuration, driver, launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compiled, joined
from ridgeplan.kernels.linear.schedule import RESERVED_BYTES, SIZES, Machine, Plan

PROBE_THREADS = 320


@cache
def source(weights: str) -> str:
    """The kernel's source, whole; `weights` names the file that knows their format."""
    return joined("linear", "config.cuh", weights, "warp_roles.cuh", "linear.cu")


def kernel(plan: Plan, device: torch.device, failing: str) -> Any:
    """The plan's kernel; None, with one warning that begins with `failing`, where it does not compile."""
    return _compiled(plan.weights.source, plan.options, device, failing)


@cache
def _compiled(weights: str, options: tuple[str, ...], device: torch.device, failing: str) -> Any:
    """May use all of a block's shared memory."""
    shared_bytes = _shared_bytes(device) - RESERVED_BYTES
    return compiled(source(weights), "linear", options, device, shared_bytes=shared_bytes, failing=failing)


def takes(x: Tensor, most_rows: int) -> bool:
    """Whether x [rows, inputs] is what such kernels take: few rows of a 16-bit dtype, on Hopper or newer."""
    if not x.is_cuda or torch.version.cuda is None or not 1 <= len(x) <= most_rows:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous() or x.data_ptr() % 16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def launch(kernel: Any, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias -> [rows, outputs], or of gated outputs their half; weight as the kernel's source takes it."""
    out = torch.empty(plan.rows, plan.outputs // (2 if plan.gated else 1), dtype=x.dtype, device=x.device)
    shape = [plan.rows, plan.inputs, plan.outputs, plan.chunk_rows, plan.own_tiles]
    ring = [plan.items, plan.weights.lead, plan.calm, plan.flight]
    with torch.cuda.device(x.device):
        launch_with_pdl(
            kernel,
            (plan.groups * plan.cut.splits, plan.chunks, 1),
            (32 * (plan.warps + 2), 1, 1),
            [x, weight, out if bias is None else bias, out, int(bias is not None), *shape, *ring],
            plan.shared_bytes,
        )
    return out


@cache
def machine(device: torch.device) -> Machine:
    """What the kernels' plans need to know of `device`."""
    return Machine(_shared_bytes(device), tuple(_clusters(size, device) for size in SIZES))


def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _clusters(size: int, device: torch.device) -> int:
    """Clusters of `size` blocks that the device holds at once: its processors come in groups of uneven size."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if size == 1:
        return num_sms
    source = f'extern "C" __global__ void __cluster_dims__({size}, 1, 1) probe() {{}}'
    shared_bytes = _shared_bytes(device) - RESERVED_BYTES
    probe = compiled(source, "probe", (), device, shared_bytes=shared_bytes, failing="clusters cannot be counted")
    count = ctypes.c_int(0)
    if probe is not None:
        grid, block = (ctypes.c_uint * 3)(size * (num_sms // size), 1, 1), (ctypes.c_uint * 3)(PROBE_THREADS, 1, 1)
        shape = Configuration(grid, block, shared_bytes)
        driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), probe.func, ctypes.byref(shape))
    return count.value or num_sms // size
