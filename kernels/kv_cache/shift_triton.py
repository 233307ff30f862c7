"""Triton kernel of the buffer shift: one program per (batch row, KV head), block of offsets, and keys or values.

It works in place: a program moves the same offsets of every group from front to back, so a single thread reads and
writes a slot, and reads it before overwriting it.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # offsets within a group per program
WARPS = 4


@triton.jit
def _shift(x, stride, capacity, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    channels = tl.arange(0, PADDED)[None, :]
    inside = (offset < GROUP) & (channels < HEAD_DIM)
    x += offset.to(tl.int64) * stride + channels
    for slot in range(0, capacity - GROUP, GROUP):
        moves = inside & (slot + offset < capacity - GROUP)
        later = tl.load(x + GROUP * stride, mask=moves)
        tl.store(x, later, mask=moves)
        x += GROUP * stride


@triton.jit(do_not_specialize=["capacity"])
def _shift_kernel(
    keys,
    values,
    mask,
    capacity,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    batch = flat // KV_HEADS
    kv_head = flat % KV_HEADS
    if tl.load(mask + batch) != 0:
        if tl.program_id(2) == 0:
            keys += batch * key_batch_stride + kv_head * key_head_stride
            _shift(keys, key_stride, capacity, GROUP, BLOCK, HEAD_DIM, PADDED)
        else:
            values += batch * value_batch_stride + kv_head * value_head_stride
            _shift(values, value_stride, capacity, GROUP, BLOCK, HEAD_DIM, PADDED)


def shift_slots_triton(keys: Tensor, values: Tensor, group: int, mask: Tensor) -> None:
    """See `ridgeplan.kernels.kv_cache.shift.shift_slots`."""
    batch, kv_heads, capacity, head_dim = keys.shape
    _shift_kernel[(batch * kv_heads, triton.cdiv(group, BLOCK), 2)](
        keys,
        values,
        mask.contiguous(),
        capacity,
        *keys.stride()[:3],
        *values.stride()[:3],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK=BLOCK,
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=WARPS,
    )
