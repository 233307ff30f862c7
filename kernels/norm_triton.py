"""Triton kernel of the residual addition with RMSNorm: one program per row, which stays in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 16  # two loads of 16 bytes from each input are in flight before the first use
MOST_WARPS = 16


@triton.jit
def _add_rms_norm_kernel(hidden, update, weight, total, normed, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    x = tl.load(hidden + row + at, mask=inside, other=0.0)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    if update is not None:
        x = (x.to(tl.float32) + tl.load(update + row + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + row + at, x, mask=inside)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(normed + row + at, (x * inverse * scale.to(tl.float32)).to(normed.dtype.element_ty), mask=inside)


def add_rms_norm_triton(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.norm.add_rms_norm`."""
    hidden = hidden.contiguous()
    normed = torch.empty_like(hidden)
    total = hidden if update is None else torch.empty_like(hidden)
    width = len(weight)
    block = triton.next_power_of_2(width)
    warps = min(MOST_WARPS, max(1, block // (32 * ELEMENTS_PER_THREAD)))
    _add_rms_norm_kernel[(hidden.numel() // width,)](
        hidden,
        None if update is None else update.contiguous(),
        weight.contiguous(),
        total,
        normed,
        eps,
        HIDDEN=width,
        BLOCK=block,
        num_warps=warps,
    )
    return total, normed
