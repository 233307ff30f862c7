"""CUDA C++ kernel of products with dense 16-bit weights (csrc/linear.cu with csrc/dense.cuh)."""

import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda_launch import LinearKernel, accepts, compiled_for, device_limits
from ridgeplan.kernels.linear.dense.schedule import K_TILE_INPUTS, MAX_ROWS, make_schedule

FALLBACK = "the CUDA dense linear kernel does not compile, the library's product runs instead"


def find_kernel(x: Tensor, weight: Tensor, gated: bool = False) -> LinearKernel | None:
    """The kernel for this product of x [rows, inputs], or None if the library must run.

    It needs Hopper or newer, up to 16 rows of a 16-bit dtype, and a contiguous weight [outputs, inputs] of that dtype.
    """
    if not accepts(x, MAX_ROWS) or weight.dtype != x.dtype or weight.device != x.device:
        return None
    if not weight.is_contiguous() or weight.data_ptr() % 16 or weight.shape[1] % K_TILE_INPUTS:
        return None
    is_bf16 = x.dtype == torch.bfloat16
    schedule = make_schedule(len(x), *weight.shape, is_bf16, gated, device_limits(x.device))
    return compiled_for(schedule, x.device, FALLBACK)
