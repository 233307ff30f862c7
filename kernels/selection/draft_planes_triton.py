"""Triton kernel that packs draft planes: one program per KV head and group."""

import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV

WARPS = 4


@triton.jit(do_not_specialize=["capacity"])
def _pack_kernel(
    key_upper, value_upper, key_two_bit, value_rows, group_index, mask, capacity,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    batch = flat // KV_HEADS
    if mask is not None:  # noqa: SIM102 (known to the compiler, unlike the second condition)
        if tl.load(mask + batch) == 0:
            return
    group = flat * capacity + tl.load(group_index + batch) + tl.program_id(1)
    QUARTER: tl.constexpr = HEAD_DIM // 4
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    HALF_GROUP: tl.constexpr = GROUP // 2

    tokens = group * GROUP + tl.arange(0, GROUP)
    quarter = tl.arange(0, QUARTER)
    at = tokens[:, None] * HALF_DIM + quarter[None, :]
    first = tl.load(key_upper + at).to(tl.int32)  # low nibbles: quarter 0 of the channels, high: quarter 2
    second = tl.load(key_upper + at + QUARTER).to(tl.int32)
    packed = ((first >> 2) & 3) | (second & 12) | ((first >> 2) & 48) | (second & 192)
    tl.store(key_two_bit + tokens[:, None] * QUARTER + quarter[None, :], packed.to(tl.uint8))

    channels = tl.arange(0, HALF_DIM)
    tokens = tl.arange(0, HALF_GROUP)
    at = (group * HEAD_DIM + channels[:, None]) * HALF_GROUP + tokens[None, :]
    first = tl.load(value_upper + at).to(tl.int32)  # low nibbles: tokens of the group's first half
    second = tl.load(value_upper + at + HALF_DIM * HALF_GROUP).to(tl.int32)
    to = (group * GROUP + tokens[:, None]) * HALF_DIM + channels[None, :]
    early = tl.trans((first & 15) | ((second & 15) << 4))
    late = tl.trans((first >> 4) | (second & 240))
    tl.store(value_rows + to, early.to(tl.uint8))
    tl.store(value_rows + to + HALF_GROUP * HALF_DIM, late.to(tl.uint8))


def pack_draft_planes_triton(
    codes: QuantizedKV, out: tuple[Tensor, Tensor], group_index: Tensor, groups: int, mask: Tensor | None
) -> None:
    """See `ridgeplan.kernels.selection.draft_planes.pack_draft_planes`; out: the 2-bit keys and the rows of values."""
    _pack_kernel[(codes.batch * codes.kv_heads, groups)](
        codes.key_upper,
        codes.value_upper,
        *out,
        group_index.contiguous(),
        mask,
        codes.groups,
        KV_HEADS=codes.kv_heads,
        GROUP=codes.group,
        HEAD_DIM=codes.head_dim,
        num_warps=WARPS,
    )
