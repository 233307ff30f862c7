"""Triton kernel of page scores: one program per KV head and block of pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # pages per program
WARPS = 4


@triton.jit(do_not_specialize=["capacity"])
def _page_scores_kernel(
    q, bounds, pages, scores, q_batch_stride, q_head_stride, capacity,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    batch, kv_head = flat // KV_HEADS, flat % KV_HEADS
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stop = tl.minimum(tl.load(pages + batch), capacity)
    if tl.program_id(1) * BLOCK >= stop:
        return
    channels = tl.arange(0, PADDED)
    known = channels < HEAD_DIM
    at = ((flat * capacity + page) * 2 * HEAD_DIM)[:, None] + channels[None, :]
    inside = (page < stop)[:, None] & known[None, :]
    low = tl.load(bounds + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(bounds + at + HEAD_DIM, mask=inside, other=0.0).to(tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    q += batch * q_batch_stride + kv_head * RATIO * q_head_stride
    for head in tl.static_range(RATIO):
        x = tl.load(q + head * q_head_stride + channels, mask=known, other=0.0).to(tl.float32)[None, :]
        best = tl.maximum(best, tl.sum(tl.maximum(x * low, x * high), 1))
    tl.store(scores + flat * capacity + page, best, mask=page < stop)


def page_scores_triton(q: Tensor, bounds: Tensor, pages: Tensor) -> Tensor:
    """See `ridgeplan.kernels.selection.pages.page_scores`."""
    q, bounds = q.contiguous(), bounds.contiguous()
    batch, kv_heads, capacity, _, head_dim = bounds.shape
    scores = torch.empty(batch, kv_heads, capacity, dtype=torch.float32, device=q.device)
    _page_scores_kernel[(batch * kv_heads, triton.cdiv(capacity, BLOCK))](
        q,
        bounds,
        pages.contiguous(),
        scores,
        q.stride(0),
        q.stride(2),
        capacity,
        KV_HEADS=kv_heads,
        RATIO=q.shape[2] // kv_heads,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return scores
