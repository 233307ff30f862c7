"""Triton kernel of the residual addition with RMSNorm: one program per row, which it holds in registers.

Few rows are split into parts. Each program then sums the whole row but writes only its part, as a single SM would take
long to move the row. docs/kernels/layer.md has the measurements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options

FEW_ROWS = 16  # most rows that are split into parts
PART = 1024  # channels per part


@triton.jit
def _stream(hidden, update, at, inside, ORDERED: tl.constexpr):
    """hidden + update (or hidden), rounded to the model's dtype."""
    x = tl.load(hidden + at, mask=inside, other=0.0, volatile=ORDERED)
    if update is not None:
        x = (x.to(tl.float32) + tl.load(update + at, mask=inside, other=0.0, volatile=ORDERED).to(tl.float32)).to(
            x.dtype
        )
    return x


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    update,
    weight,
    total,
    normed,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Volatile loads keep their order. With few rows latency matters, and the compiler would otherwise load the weight
    # only after the row has arrived. Many rows share the weight in the L1 cache, which volatile loads bypass.
    ORDERED: tl.constexpr = PARTS > 0
    WIDTH: tl.constexpr = BLOCK // PARTS if ORDERED else BLOCK
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    own = tl.arange(0, WIDTH)
    if ORDERED:
        own += tl.program_id(1) * WIDTH
    written = own < HIDDEN
    scale = tl.load(weight + own, mask=written, other=0.0, volatile=ORDERED).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _stream(hidden, update, row + own, written, ORDERED)
    whole = x
    if WIDTH < BLOCK:
        every = tl.arange(0, BLOCK)
        whole = _stream(hidden, update, row + every, every < HIDDEN, ORDERED)
    whole = whole.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(whole * whole, 0) / HIDDEN + eps)
    if update is not None:
        tl.store(total + row + own, x, mask=written)
    tl.store(normed + row + own, (x.to(tl.float32) * inverse * scale).to(normed.dtype.element_ty), mask=written)


def add_rms_norm_triton(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.layer.norm.add_rms_norm`."""
    hidden = hidden.contiguous()
    normed = torch.empty_like(hidden)
    total = hidden if update is None else torch.empty_like(hidden)
    width = len(weight)
    rows, block = hidden.numel() // width, triton.next_power_of_2(width)
    parts = max(1, block // PART) if rows <= FEW_ROWS else 0
    early = pdl_options(hidden)
    if not weight.is_contiguous():  # a copy just made is not yet visible before the wait
        early = dict.fromkeys(early, False)
    _add_rms_norm_kernel[(rows, max(1, parts))](
        hidden,
        None if update is None else update.contiguous(),
        weight.contiguous(),
        total,
        normed,
        eps,
        HIDDEN=width,
        BLOCK=block,
        PARTS=parts,
        **early,
        num_warps=max(4 if parts else 1, min(16, block // 512)),
    )
    return total, normed
