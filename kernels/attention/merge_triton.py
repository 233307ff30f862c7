"""Triton kernel of the log-sum-exp merge: one program per query row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.attention.cost import merge_metadata

CHUNK = 16  # splits whose partials are in flight together


@triton.jit(launch_metadata=merge_metadata, do_not_specialize=["splits"])
def _merge_kernel(partial, lse, out, splits, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, HEAD_DIM)
    row_max = -3.0e38  # finite, so that the difference of two is no NaN if all splits are empty
    row_sum = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, splits, CHUNK):
        at = start + tl.arange(0, CHUNK)
        split_lse = tl.load(lse + row * splits + at, mask=at < splits, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(split_lse, 0))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(split_lse - new_max)
        # An empty split has not written its partial, which must not be read.
        part = (row * splits + at)[:, None] * HEAD_DIM + channels[None, :]
        part = tl.load(partial + part, mask=(split_lse > float("-inf"))[:, None], other=0.0)
        acc = acc * rescale + tl.sum(weights[:, None] * part, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    acc /= tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(out + row * HEAD_DIM + channels, acc.to(out.dtype.element_ty))


def merge_triton(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ridgeplan.kernels.attention.merge.merge`; head_dim must be a power of two."""
    partial, lse = partial.contiguous(), lse.contiguous()
    *rows, splits, head_dim = partial.shape
    out = torch.empty(*rows, head_dim, dtype=dtype, device=partial.device)
    _merge_kernel[(lse.numel() // splits,)](
        partial,
        lse,
        out,
        splits,
        HEAD_DIM=head_dim,
        CHUNK=CHUNK,
        num_warps=2,
    )
    return out
