"""Triton kernel of scores from 2-bit keys: one program per KV head and range of groups."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.dot_triton import dot
from ridgeplan.kernels.device.nibbles_triton import INTERPRETED
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
GROUPS = 4  # per program
WARPS = 4
STAGES = 3

# Four bytes -> their sixteen 2-bit codes in bf16, plus 128: the bytes 0x43, n are the bf16 number 128 + n, so one byte
# permutation converts two codes.
CODES_TO_BF16 = tl.constexpr("""{
.reg .b32 part;
and.b32 part, $8, 0x03030303;
prmt.b32 $0, part, 0x43434343, 0x4140;
prmt.b32 $1, part, 0x43434343, 0x4342;
shr.u32 part, $8, 2;
and.b32 part, part, 0x03030303;
prmt.b32 $2, part, 0x43434343, 0x4140;
prmt.b32 $3, part, 0x43434343, 0x4342;
shr.u32 part, $8, 4;
and.b32 part, part, 0x03030303;
prmt.b32 $4, part, 0x43434343, 0x4140;
prmt.b32 $5, part, 0x43434343, 0x4342;
shr.u32 part, $8, 6;
and.b32 part, part, 0x03030303;
prmt.b32 $6, part, 0x43434343, 0x4140;
prmt.b32 $7, part, 0x43434343, 0x4342;
}""")


@triton.jit
def _load_quarter(q, row, part, valid, QUARTER: tl.constexpr):
    at = row[:, None] + (part * QUARTER + tl.arange(0, QUARTER))[None, :]
    return tl.load(q + at, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def _unpack(codes, dtype: tl.constexpr):
    """The four 2-bit codes of each byte, plus 128 in bfloat16, by channel part (`DraftPlanes.key_two_bit`)."""
    if dtype == tl.bfloat16 and not INTERPRETED:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            CODES_TO_BF16, "=r,=r,=r,=r,=r,=r,=r,=r,r", [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 0
        wide = codes.to(tl.int32)
        c0 = ((wide & 3) + OFFSET).to(tl.float32).to(dtype)
        c1 = (((wide >> 2) & 3) + OFFSET).to(tl.float32).to(dtype)
        c2 = (((wide >> 4) & 3) + OFFSET).to(tl.float32).to(dtype)
        c3 = (((wide >> 6) & 3) + OFFSET).to(tl.float32).to(dtype)
    return c0, c1, c2, c3


@triton.jit
def _add_quarter(
    scores, bias, x, codes, part, at, key_scale, key_min, scale, QUARTER: tl.constexpr, dtype: tl.constexpr
):
    """Adds a quarter of the channels: a code c stands for step * (4 c + 1.5) + minimum."""
    pair = at + part * QUARTER + tl.arange(0, QUARTER)
    step = tl.load(key_scale + pair).to(tl.float32) * scale
    zero = tl.load(key_min + pair).to(tl.float32) * scale + 1.5 * step
    scaled = (x * (4 * step)[None, :]).to(dtype)
    zeros = x * zero[None, :]
    if dtype == tl.bfloat16:
        zeros -= 128 * scaled.to(tl.float32)  # of the rounded queries, so that the offset cancels
    return dot(scaled, tl.trans(codes), scores), bias + tl.sum(zeros, 1)


@triton.jit(do_not_specialize=["scale", "capacity"])
def _two_bit_kernel(
    q, key_two_bit, key_scale, key_min, groups, lse, scores, scale, capacity,
    q_batch_stride, q_head_stride,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    batch, kv_head = flat // KV_HEADS, flat % KV_HEADS
    heads = tl.arange(0, ROWS)
    valid = heads < RATIO
    visible = tl.minimum(tl.load(groups + batch), capacity)
    start = tl.program_id(1) * GROUPS
    QUARTER: tl.constexpr = HEAD_DIM // 4
    row = batch * q_batch_stride + (kv_head * RATIO + heads) * q_head_stride
    q0 = _load_quarter(q, row, 0, valid, QUARTER)
    q1 = _load_quarter(q, row, 1, valid, QUARTER)
    q2 = _load_quarter(q, row, 2, valid, QUARTER)
    q3 = _load_quarter(q, row, 3, valid, QUARTER)
    norm = tl.load(lse + flat * RATIO + heads, mask=valid, other=0.0) / LN_2
    tokens = tl.arange(0, GROUP)
    for group in range(start, tl.minimum(start + GROUPS, visible)):
        at = flat * capacity + group
        byte = (at * GROUP + tokens)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
        codes = tl.load(key_two_bit + byte)
        logits = tl.zeros([ROWS, GROUP], tl.float32)
        bias = tl.zeros([ROWS], tl.float32)
        pair = at * HEAD_DIM
        dtype: tl.constexpr = q.dtype.element_ty
        c0, c1, c2, c3 = _unpack(codes, dtype)
        logits, bias = _add_quarter(logits, bias, q0, c0, 0, pair, key_scale, key_min, scale, QUARTER, dtype)
        logits, bias = _add_quarter(logits, bias, q1, c1, 1, pair, key_scale, key_min, scale, QUARTER, dtype)
        logits, bias = _add_quarter(logits, bias, q2, c2, 2, pair, key_scale, key_min, scale, QUARTER, dtype)
        logits, bias = _add_quarter(logits, bias, q3, c3, 3, pair, key_scale, key_min, scale, QUARTER, dtype)
        logits += bias[:, None]
        relative = tl.where(valid[:, None], logits - norm[:, None], float("-inf"))
        top = tl.max(relative, 0)
        score = (top + tl.log2(tl.sum(tl.exp2(relative - top[None, :]), 0))) * LN_2
        tl.store(scores + at * GROUP + tokens, score)


def two_bit_scores_triton(q: Tensor, keys: TwoBitKeys, groups: Tensor, lse: Tensor, scale: float) -> Tensor:
    """See `ridgeplan.kernels.selection.two_bit.two_bit_scores`."""
    q, groups = q.contiguous(), groups.contiguous()
    batch, _, q_heads, head_dim = q.shape
    ratio, parts = q_heads // keys.kv_heads, triton.cdiv(keys.groups, GROUPS)
    scores = torch.empty(batch, keys.kv_heads, keys.groups * keys.group, dtype=torch.float32, device=q.device)
    _two_bit_kernel[(batch * keys.kv_heads, parts)](
        q,
        keys.codes,
        keys.scale,
        keys.minimum,
        groups,
        lse,
        scores,
        scale * LOG2_E,
        keys.groups,
        q.stride(0),
        q.stride(2),
        KV_HEADS=keys.kv_heads,
        RATIO=ratio,
        GROUP=keys.group,
        HEAD_DIM=head_dim,
        ROWS=max(16, triton.next_power_of_2(ratio)),
        GROUPS=GROUPS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return scores
