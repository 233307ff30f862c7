"""CUDA C++ kernels of linear layers for few rows (csrc/), compiled at first use and launched with PDL.

docs/kernels/linear.md explains how they work and what was measured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.cuda import (
    KernelParams,
    LaunchConfig,
    compile_kernel,
    driver,
    is_on_hopper,
    launch_with_pdl,
    program,
)
from ridgeplan.kernels.linear.schedule import (
    CLUSTER_SIZES,
    K_TILE_INPUTS,
    MAX_DENSE_ROWS,
    RESERVED_BYTES,
    DeviceLimits,
    LinearSchedule,
    choose_quantized_schedule,
    make_dense_schedule,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline.execution import MAX_QUANTIZED_ROWS

SOURCE, ENTRY = "linear/csrc/linear.cu", "linear"
PROBE_THREADS = 320


class LinearParams(KernelParams):
    """See csrc/config.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "lower", "bias", "y")),
        *((name, ctypes.c_int) for name in ("rows", "inputs", "outputs", "rows_per_pass", "max_tiles")),
        *((name, ctypes.c_int) for name in ("stages", "trigger_stages", "stages_before_x", "stages_after_x")),
    )


@dataclass(frozen=True)
class LinearKernel:
    """A compiled kernel, and the schedule of its product."""

    compiled: Any
    schedule: LinearSchedule

    def run(self, x: Tensor, weight: Tensor, lower: Tensor | None = None, *, bias: Tensor | None) -> Tensor:
        """x W^T + bias -> [rows, outputs], or of gated outputs half as many; weight as the kernel reads it.

        lower: the second plane of 8-bit weights.
        """
        schedule = self.schedule
        width = schedule.outputs // (2 if schedule.gated else 1)
        y = torch.empty(schedule.rows, width, dtype=x.dtype, device=x.device)
        params = LinearParams(
            x=x, weight=weight, lower=lower, bias=bias, y=y,
            rows=schedule.rows, inputs=schedule.inputs, outputs=schedule.outputs,
            rows_per_pass=schedule.rows_per_pass, max_tiles=schedule.max_tiles, stages=schedule.stages,
            trigger_stages=schedule.weights.trigger_stages,
            stages_before_x=schedule.stages_before_x, stages_after_x=schedule.stages_after_x,
        )  # fmt: skip
        with torch.cuda.device(x.device):
            launch_with_pdl(self.compiled, schedule.grid, (schedule.threads, 1, 1), params, schedule.shared_bytes)
        return y


def compiled_for(schedule: LinearSchedule | None, device: torch.device, fallback: str) -> LinearKernel | None:
    """The schedule's kernel; None without a schedule or, after one warning, if the kernel does not compile."""
    if schedule is None:
        return None
    compiled = _compiled(schedule.options, device, fallback)
    return None if compiled is None else LinearKernel(compiled, schedule)


@cache
def _compiled(options: tuple[str, ...], device: torch.device, fallback: str) -> Any | None:
    """The kernel may use all of a CTA's shared memory."""
    shared_bytes = _sm_bytes(device) - RESERVED_BYTES
    text = program(SOURCE, LinearParams)
    return compile_kernel(text, ENTRY, options, device, shared_bytes=shared_bytes, fallback=fallback)


def accepts(x: Tensor, max_rows: int) -> bool:
    """Whether these kernels support x [rows, inputs]: few rows of a 16-bit dtype, on Hopper or newer."""
    if not is_on_hopper(x) or not 1 <= len(x) <= max_rows or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return x.is_contiguous() and x.data_ptr() % 16 == 0


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The properties of `device` that schedules depend on."""
    return DeviceLimits(_sm_bytes(device), tuple(_clusters(size, device) for size in CLUSTER_SIZES))


def _sm_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _clusters(size: int, device: torch.device) -> int:
    """Clusters of `size` CTAs resident at once; fewer than SMs / size, as GPCs differ in their number of SMs."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if size == 1:
        return num_sms
    probe = f'extern "C" __global__ void __cluster_dims__({size}, 1, 1) probe() {{}}'
    shared_bytes = _sm_bytes(device) - RESERVED_BYTES
    kernel = compile_kernel(
        probe, "probe", (), device, shared_bytes=shared_bytes, fallback="clusters cannot be counted"
    )
    count = ctypes.c_int(0)
    if kernel is not None:
        grid, block = (ctypes.c_uint * 3)(size * (num_sms // size), 1, 1), (ctypes.c_uint * 3)(PROBE_THREADS, 1, 1)
        config = LaunchConfig(grid, block, shared_bytes)
        driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel.func, ctypes.byref(config))
    return count.value or num_sms // size


DENSE_FALLBACK = "the CUDA dense linear kernel does not compile, the library's product runs instead"


def find_dense_kernel(x: Tensor, weight: Tensor, gated: bool = False) -> LinearKernel | None:
    """The kernel for this product of x [rows, inputs], or None if the library must run.

    It needs Hopper or newer, up to 16 rows of a 16-bit dtype, and a contiguous weight [outputs, inputs] of that dtype.
    """
    if not accepts(x, MAX_DENSE_ROWS) or weight.dtype != x.dtype or weight.device != x.device:
        return None
    if not weight.is_contiguous() or weight.data_ptr() % 16 or weight.shape[1] % K_TILE_INPUTS:
        return None
    is_bf16 = x.dtype == torch.bfloat16
    schedule = make_dense_schedule(len(x), *weight.shape, is_bf16, gated, device_limits(x.device))
    return compiled_for(schedule, x.device, DENSE_FALLBACK)


QUANTIZED_FALLBACK = "the CUDA quantized linear kernel does not compile, Triton's runs instead"


def find_quantized_kernel(x: Tensor, weight: Int4Weight | Int8Weight, gated: bool = False) -> LinearKernel | None:
    """The kernel for this product of x [rows, inputs], or None if Triton's must run.

    It needs Hopper or newer, and 1 to 64 rows of a 16-bit dtype. 8-bit weights in groups of 256 need bfloat16.
    """
    planes = [plane.packed for plane in weight.planes]
    if not accepts(x, MAX_QUANTIZED_ROWS) or planes[0].device != x.device:
        return None
    if any(plane.data_ptr() % 16 for plane in planes):
        return None
    shape, bits = (len(x), weight.outputs, weight.inputs, weight.group), 4 * len(weight.planes)
    if bits == 8 and weight.group > 128 and x.dtype == torch.float16:
        return None  # codes enter as 1024 + code: what tensor cores truncate of 256 such terms exceeds fp16's precision
    schedule = choose_quantized_schedule(*shape, x.dtype == torch.bfloat16, gated, device_limits(x.device), bits)
    return compiled_for(schedule, x.device, QUANTIZED_FALLBACK)
