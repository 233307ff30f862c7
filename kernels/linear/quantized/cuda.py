"""CUDA C++ kernel of products with 4-bit and 8-bit weights (csrc/linear.cu with csrc/quantized.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda_launch import LinearKernel, accepts, compiled_for, device_limits
from ridgeplan.kernels.linear.quantized.int4_weight import Int4Weight
from ridgeplan.kernels.linear.quantized.int8_weight import Int8Weight
from ridgeplan.kernels.linear.quantized.schedule import MAX_ROWS, make_schedule

FALLBACK = "the CUDA quantized linear kernel does not compile, Triton's runs instead"


def find_kernel(x: Tensor, weight: Int4Weight | Int8Weight, gated: bool = False) -> LinearKernel | None:
    """The kernel for this product of x [rows, inputs], or None if Triton's must run.

    It needs Hopper or newer, and 1 to 64 rows of a 16-bit dtype. 8-bit weights in groups of 256 need bfloat16.
    """
    if not accepts(x, MAX_ROWS) or weight.planes[0].packed.device != x.device:
        return None
    shape, bits = (len(x), weight.outputs, weight.inputs, weight.group), 4 * len(weight.planes)
    if bits == 8 and weight.group > 128 and x.dtype == torch.float16:
        return None  # codes enter as 1024 + code: what tensor cores truncate of 256 such terms exceeds fp16's precision
    schedule = make_schedule(*shape, x.dtype == torch.bfloat16, gated, device_limits(x.device), bits)
    return compiled_for(schedule, x.device, FALLBACK)
