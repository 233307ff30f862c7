"""Triton kernel of the residual addition with RMSNorm: one program per row, which stays in registers.

Log on one H200 (us in a graph; cold: a fill clears the cache before each call; eager torch, cold, takes 5.0 for one row
of 576, 8.2 of 4096 and 24.6 for 2048 rows of 4096; a kernel that just copies one row of 4096 takes 1.9):
- first version: predicted 2.0 for one row of 4096, measured 2.6 (1.7 warm), and 2.2 for 576. The machine code asked for
  the weight only after waiting for the row: two latencies one after another.
- volatile loads, which keep their order: predicted 0.4 less; measured 0.3 less for 576 and 896, 0.1 for 4096, but 6.0
  instead of 4.8 for 2048 rows of 576, as every row then reads the weight anew. So only few rows use them.
- a row in parts of 1024 channels, each program summing the whole row: one multiprocessor moved the 40 KB of a row of
  4096 in 0.4 us. Predicted 2.3 for 4096, measured 2.3 to 2.4 (1.55 warm); 2.5 instead of 3.0 for 8192.
- many rows: 18.8 for 2048 of 4096 (3.6 TB/s), 131 for 8192 of 8192 (4.1 TB/s).
- programmatic dependent launch of this, rope and swiglu: predicted 0.5 less each; measured 0.4 less in a chain of one
  kernel, but layers of an 8B model with cuBLAS' products took 125 / 128 / 133 instead of 123 / 125 / 130 us for 1, 9
  and 32 rows. With products that prefetch their weights meanwhile, and every kernel of a layer launched early, a plain
  step at 4096 tokens fell from 4.82 to 4.06 ms.
- in a chain of norms in one graph, few rows cached (validate/kernels_h200.json): 1.0 / 1.1 / 2.3 / 16.7 for 1 / 9 /
  64 / 2048 rows of 4096.
The fills are timed apart and taken off: between runs a cold figure moves by up to 0.6 (2.4 and 1.8 for one row of
4096), within one run far less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options

FEW_ROWS = 16  # up to which a row is cut into parts
PART = 1024  # channels that a program then writes


@triton.jit
def _stream(hidden, update, at, inside, ORDERED: tl.constexpr):
    """hidden + update (or hidden), rounded to the model's type."""
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
    # Volatile loads keep their order. Few rows are a matter of latency, and left to itself the compiler asks for the
    # weight only when the row has come; many rows share the weight in a cache that volatile loads pass by.
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
    if not weight.is_contiguous():  # its copy is too new to be read before the wait
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
