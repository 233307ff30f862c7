"""Triton kernel of `store_group`: one program per row and KV head, and block of tokens."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # tokens
WARPS = 4


@triton.jit
def _store_group_kernel(
    recent,
    out,
    first,
    mask,
    batch_stride,
    head_stride,
    slot_stride,
    out_batch_stride,
    out_head_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    batch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    if tl.load(mask + batch) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        channel = tl.arange(0, PADDED)[None, :]
        inside = (token < GROUP) & (channel < HEAD_DIM)
        start = tl.load(first + batch).to(tl.int64)
        at = batch * batch_stride + head * head_stride + token * slot_stride + channel
        to = batch * out_batch_stride + head * out_head_stride + (start + token) * out_stride + channel
        tl.store(out + to, tl.load(recent + at, mask=inside), mask=inside)


def store_group_triton(recent: Tensor, out: Tensor, first: Tensor, group: int, mask: Tensor) -> None:
    """See `ridgeplan.kernels.residency.group_store.store_group`."""
    batch, kv_heads, _, head_dim = recent.shape
    _store_group_kernel[(batch * kv_heads, triton.cdiv(group, BLOCK))](
        recent,
        out,
        first,
        mask.contiguous(),
        *recent.stride()[:3],
        *out.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK=BLOCK,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=WARPS,
    )
