"""Triton kernel of the log-sum-exp merge: one program per query row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.cost import merge_metadata

CHUNK = 16  # splits whose partials are in flight together


@triton.jit(launch_metadata=merge_metadata)
def _merge_kernel(
    partial, lse, out, SPLITS: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, HEAD_DIM)
    every = tl.arange(0, PADDED)
    all_sums = tl.load(lse + row * SPLITS + every, mask=every < SPLITS, other=float("-inf"))
    top = tl.max(all_sums, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(all_sums - top), 0)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        splits = start + tl.arange(0, CHUNK)
        sums = tl.load(lse + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
        at = (row * SPLITS + splits)[:, None] * HEAD_DIM + channels[None, :]
        # Programs of empty splits never wrote their partial, so it must not be read.
        part = tl.load(partial + at, mask=(sums > float("-inf"))[:, None], other=0.0)
        acc += tl.sum(tl.exp(sums - top)[:, None] * part, 0)
    acc /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + channels, acc.to(out.dtype.element_ty))


def merge_triton(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ridgeplan.kernels.merge.merge`; head_dim must be a power of two."""
    partial, lse = partial.contiguous(), lse.contiguous()
    *rows, splits, head_dim = partial.shape
    out = torch.empty(*rows, head_dim, dtype=dtype, device=partial.device)
    _merge_kernel[(lse.numel() // splits,)](
        partial,
        lse,
        out,
        SPLITS=splits,
        PADDED=triton.next_power_of_2(splits),
        HEAD_DIM=head_dim,
        CHUNK=CHUNK,
        num_warps=2,
    )
    return out
