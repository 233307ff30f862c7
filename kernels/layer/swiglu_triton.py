"""Triton kernel of SwiGLU: one program per row and block of channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options
from ridgeplan.kernels.device.pdl_triton import pdl_launch_dependents_and_wait

BLOCK = 1024  # channels per program
WARPS = 4


@triton.jit
def _swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate_up += row * (2 * WIDTH)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH + at, mask=inside, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + at, product.to(out.dtype.element_ty), mask=inside)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """See `ridgeplan.kernels.layer.swiglu.swiglu`."""
    gate_up = gate_up.contiguous()
    *rows, both = gate_up.shape
    width = both // 2
    out = torch.empty(*rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (gate_up.numel() // both, triton.cdiv(width, BLOCK))
    _swiglu_kernel[grid](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS, **pdl_options(gate_up))
    return out
