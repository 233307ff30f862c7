"""Triton kernels of selection: packing of draft planes, page, head and 2-bit scores, and radix top-k.

Several programs share a row. Histograms are added with integer atomics, so the result does not depend on their order.
The grid is fixed by the scores' width, and lengths and k are read on the device, for CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.triton_helpers import INTERPRETED, dot
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import TwoBitKeys

# Packing of draft planes

PACK_WARPS = 4


@triton.jit(do_not_specialize=["capacity"])
def _pack_kernel(
    key_upper,  # uint8 [batch, KV_HEADS, capacity, GROUP, HEAD_DIM / 2]
    value_upper,  # uint8 [batch, KV_HEADS, capacity, HEAD_DIM, GROUP / 2]
    key_two_bit,  # out: uint8 [batch, KV_HEADS, capacity, GROUP, HEAD_DIM / 4]
    value_rows,  # out: uint8 [batch, KV_HEADS, capacity, GROUP, HEAD_DIM / 2]
    group_index,  # int32 [batch]
    mask,  # bool [batch], or None
    capacity,  # groups of a row
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
        num_warps=PACK_WARPS,
    )


# Page scores

PAGE_BLOCK = 32  # pages per program
PAGE_WARPS = 4


@triton.jit(do_not_specialize=["capacity"])
def _page_scores_kernel(
    q,  # [batch, 1, KV_HEADS * RATIO, HEAD_DIM]
    bounds,  # [batch, KV_HEADS, capacity, 2, HEAD_DIM], smallest and largest keys
    pages,  # int32 [batch]
    scores,  # out: float32 [batch, KV_HEADS, capacity]
    q_batch_stride, q_head_stride,
    capacity,  # pages of a row
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
    """See `ridgeplan.kernels.selection.page_scores`."""
    q, bounds = q.contiguous(), bounds.contiguous()
    batch, kv_heads, capacity, _, head_dim = bounds.shape
    scores = torch.empty(batch, kv_heads, capacity, dtype=torch.float32, device=q.device)
    _page_scores_kernel[(batch * kv_heads, triton.cdiv(capacity, PAGE_BLOCK))](
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
        BLOCK=PAGE_BLOCK,
        num_warps=PAGE_WARPS,
    )
    return scores


# Top-k: a histogram for each digit, then counts and indices of what is chosen

TOP_K_PASSES = 4  # digits of 8 bits of a 32-bit key
TOP_K_BINS = tl.constexpr(256)  # values of a digit; a histogram's cost per score grows with its bins
TOP_K_BLOCK = 2048  # scores in flight of a program
TOP_K_CHUNK = 8192  # scores of a program, fewer where that fills the GPU
MIN_PROGRAMS = 512
TOP_K_WARPS = 8


@triton.jit
def _sort_keys(scores, at, inside):
    """Unsigned integers ordered like the scores; NaN like -inf, -0 like 0."""
    x = tl.load(scores + at, mask=inside, other=0.0)
    x = tl.where(x != x, float("-inf"), tl.where(x == 0, 0.0, x))
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def _find_digit(histogram, rank):
    """The digit of the `rank`-th largest key, and that key's rank among the keys with this digit."""
    bins = tl.arange(0, TOP_K_BINS)
    counts = tl.load(histogram + bins)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.max(tl.where(above + counts >= rank, bins, 0), 0)
    return digit, rank - tl.sum(tl.where(bins == digit, above, 0), 0)


@triton.jit
def _num_chosen(lengths, k, row, max_k):
    """How many scores a row chooses: the smallest of k, max_k and its length."""
    return tl.maximum(tl.minimum(tl.minimum(tl.load(lengths + row), tl.load(k + row)), max_k), 0)


@triton.jit
def _prefix(histograms, rank, DIGITS: tl.constexpr):
    """The first DIGITS digits of the `rank`-th largest key, as a number, and its rank among the keys with them."""
    prefix = tl.zeros([], tl.uint32)
    for i in tl.static_range(DIGITS):
        digit, rank = _find_digit(histograms + i * TOP_K_BINS, rank)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return prefix, rank


@triton.jit(do_not_specialize=["width", "max_k"])
def _histogram_kernel(
    scores,  # float32 [rows, width]
    lengths, k,  # int32 [rows]
    histograms,  # int32 [rows, PASSES, 256], added to
    width, max_k,
    DIGIT: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    num_chosen = _num_chosen(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    if (first >= stop) | (num_chosen == 0):
        return
    histograms += row * PASSES * TOP_K_BINS
    prefix, _ = _prefix(histograms, num_chosen, DIGIT)
    counts = tl.zeros([TOP_K_BINS], tl.int32)
    for start in range(first, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < stop
        keys = _sort_keys(scores, row * width + at, inside)
        if DIGIT > 0:
            inside = inside & ((keys >> (32 - 8 * DIGIT)) == prefix)
        digit = ((keys >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
        counts += tl.histogram(digit, TOP_K_BINS, mask=inside)
    tl.atomic_add(histograms + DIGIT * TOP_K_BINS + tl.arange(0, TOP_K_BINS), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["width", "max_k"])
def _count_kernel(
    scores, lengths, k, histograms,  # as in _histogram_kernel
    counts,  # out: int32 [rows, programs, 2]
    width, max_k,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program's number of keys above the last chosen one's, and of those equal to it."""
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = program * CHUNK
    num_chosen = _num_chosen(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    counts += (row * tl.num_programs(1) + program) * 2
    above, equal = 0, 0
    if (first < stop) & (num_chosen > 0):
        last, _ = _prefix(histograms + row * PASSES * TOP_K_BINS, num_chosen, PASSES)
        for start in range(first, stop, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = _sort_keys(scores, row * width + at, at < stop)
            above += tl.sum(((at < stop) & (keys > last)).to(tl.int32), 0)
            equal += tl.sum(((at < stop) & (keys == last)).to(tl.int32), 0)
    tl.store(counts, above)
    tl.store(counts + 1, equal)


@triton.jit(do_not_specialize=["width", "max_k"])
def _write_kernel(
    scores, lengths, k, histograms, counts,  # as in _count_kernel
    index,  # out: int32 [rows, max_k], ascending
    count,  # out: int32 [rows]
    width, max_k,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = program * CHUNK
    num_chosen = _num_chosen(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    if program == 0:
        tl.store(count + row, num_chosen)
    if (first >= stop) | (num_chosen == 0):
        return
    last, equals = _prefix(histograms + row * PASSES * TOP_K_BINS, num_chosen, PASSES)
    programs = tl.arange(0, PROGRAMS)
    before = counts + row * tl.num_programs(1) * 2 + programs * 2
    above = tl.sum(tl.load(before, mask=programs < program, other=0), 0)
    equal = tl.sum(tl.load(before + 1, mask=programs < program, other=0), 0)
    for start in range(first, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = _sort_keys(scores, row * width + at, at < stop)
        greater = ((at < stop) & (keys > last)).to(tl.int32)
        same = ((at < stop) & (keys == last)).to(tl.int32)
        greater_rank = above + tl.cumsum(greater, 0) - greater
        same_rank = equal + tl.cumsum(same, 0) - same
        chosen = (greater == 1) | ((same == 1) & (same_rank < equals))
        tl.store(index + row * max_k + greater_rank + tl.minimum(same_rank, equals), at, mask=chosen)
        above += tl.sum(greater, 0)
        equal += tl.sum(same, 0)


def top_k_triton(scores: Tensor, lengths: Tensor, k: Tensor, max_k: int) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.selection.top_k`."""
    scores, lengths, k = scores.contiguous(), lengths.contiguous(), k.contiguous()
    rows, width = scores.shape
    chunk = TOP_K_CHUNK if rows * triton.cdiv(width, TOP_K_CHUNK) >= MIN_PROGRAMS else TOP_K_BLOCK
    programs = triton.cdiv(width, chunk)
    histograms = torch.zeros(rows, TOP_K_PASSES, TOP_K_BINS.value, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, programs, 2, dtype=torch.int32, device=scores.device)
    index = torch.empty(rows, max_k, dtype=torch.int32, device=scores.device)
    count = torch.empty(rows, dtype=torch.int32, device=scores.device)
    grid = (rows, programs)
    sizes = {"PASSES": TOP_K_PASSES, "BLOCK": TOP_K_BLOCK, "CHUNK": chunk, "num_warps": TOP_K_WARPS}
    inputs = (scores, lengths, k, histograms)
    for digit in range(TOP_K_PASSES):
        _histogram_kernel[grid](*inputs, width, max_k, DIGIT=digit, **sizes)
    _count_kernel[grid](*inputs, counts, width, max_k, **sizes)
    padded = triton.next_power_of_2(programs)
    _write_kernel[grid](*inputs, counts, index, count, width, max_k, PROGRAMS=padded, **sizes)
    return index, count


LOG2_E = 1.4426950408889634

# Scores of a retrieval head

HEAD_BLOCK = 64  # tokens of a product
HEAD_CHUNK = 512  # tokens of a program
HEAD_SCORES_BLOCK = 1024  # tokens of a program that reads logits
HEAD_WARPS = 4
HEAD_STAGES = 3


@triton.jit(do_not_specialize=["scale", "slots"])
def _head_logits_kernel(
    q,  # [rows, KV_HEADS * RATIO, HEAD_DIM]
    keys,  # [rows, KV_HEADS, slots, HEAD_DIM]
    lengths,  # int32 [rows]
    logits,  # out: float32 [rows, KV_HEADS * RATIO, slots], times log2(e)
    lse,  # out: float32 [rows, KV_HEADS * RATIO, chunks], the log2-sum-exp2 of each chunk's logits
    scale,  # of the softmax, times log2(e)
    slots,
    KV_HEADS: tl.constexpr, RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    stop = tl.minimum(tl.load(lengths + flat // KV_HEADS), tl.minimum(slots, first + CHUNK))
    if first >= stop:
        return
    channel = tl.arange(0, PADDED)[None, :]
    heads = tl.arange(0, ROWS)
    valid = heads < RATIO
    row = flat * RATIO + heads
    x = tl.load(q + row[:, None] * HEAD_DIM + channel, mask=valid[:, None] & (channel < HEAD_DIM), other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(first, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < stop
        at = (flat * slots + token)[:, None] * HEAD_DIM + channel
        key = tl.load(keys + at, mask=inside[:, None] & (channel < HEAD_DIM), other=0.0)
        part = dot(x, tl.trans(key), tl.zeros([ROWS, BLOCK], tl.float32)) * scale
        part = tl.where(inside[None, :], part, float("-inf"))
        tl.store(logits + row[:, None] * slots + token[None, :], part, mask=valid[:, None] & inside[None, :])
        higher = tl.maximum(top, tl.max(part, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(part - higher[:, None]), 1)
        top = higher
    tl.store(lse + row * tl.num_programs(1) + tl.program_id(1), top + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["slots", "chunks"])
def _head_scores_kernel(
    logits, lse, lengths,  # as in _head_logits_kernel
    scores,  # out: float32 [rows, GROUPS, slots]
    slots, chunks,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    flat = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    length = tl.minimum(tl.load(lengths + flat // GROUPS), slots)
    if first >= length:
        return
    token = first + tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for head in range(HEADS):
        row = flat * HEADS + head
        part = tl.load(lse + row * chunks + chunk, mask=chunk * CHUNK < length, other=float("-inf"))
        top = tl.max(part, 0)
        norm = top + tl.log2(tl.sum(tl.exp2(part - top), 0))
        best = tl.maximum(best, tl.load(logits + row * slots + token, mask=token < length, other=0.0) - norm)
    tl.store(scores + flat * slots + token, tl.exp2(best), mask=token < length)


def head_scores_triton(q: Tensor, keys: Tensor, lengths: Tensor, groups: int) -> Tensor:
    """See `ridgeplan.kernels.selection.head_scores.head_scores`."""
    q, keys, lengths = q.contiguous(), keys.contiguous(), lengths.contiguous()
    rows, kv_heads, slots, head_dim = keys.shape
    q_heads, chunks = q.shape[1], triton.cdiv(slots, HEAD_CHUNK)
    logits, lse, scores = (
        torch.empty(rows, heads, width, dtype=torch.float32, device=q.device)
        for heads, width in ((q_heads, slots), (q_heads, chunks), (groups, slots))
    )
    ratio, scale = q_heads // kv_heads, head_dim**-0.5 * LOG2_E
    _head_logits_kernel[(rows * kv_heads, chunks)](
        q, keys, lengths, logits, lse, scale, slots, KV_HEADS=kv_heads, RATIO=ratio, HEAD_DIM=head_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)), ROWS=max(16, triton.next_power_of_2(ratio)),
        BLOCK=HEAD_BLOCK, CHUNK=HEAD_CHUNK, num_warps=HEAD_WARPS, num_stages=HEAD_STAGES,
    )  # fmt: skip
    _head_scores_kernel[(rows * groups, triton.cdiv(slots, HEAD_SCORES_BLOCK))](
        logits, lse, lengths, scores, slots, chunks, GROUPS=groups, HEADS=q_heads // groups,
        CHUNKS=triton.next_power_of_2(chunks), CHUNK=HEAD_CHUNK, BLOCK=HEAD_SCORES_BLOCK, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return scores


# Scores from 2-bit keys

LN_2 = tl.constexpr(0.6931471805599453)
SCAN_GROUPS = 4  # per program
SCAN_WARPS = 4
SCAN_STAGES = 3

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
    q,  # [batch, 1, KV_HEADS * RATIO, HEAD_DIM]
    key_two_bit,  # uint8 [batch, KV_HEADS, capacity, GROUP, HEAD_DIM / 4]
    key_scale, key_min,  # float16 [batch, KV_HEADS, capacity, HEAD_DIM]
    groups,  # int32 [batch]
    lse,  # float32 [batch, KV_HEADS * RATIO]
    scores,  # out: float32 [batch, KV_HEADS, capacity * GROUP]
    scale,  # of the softmax, times log2(e)
    capacity,  # groups of a row
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
    """See `ridgeplan.kernels.selection.two_bit_scores`."""
    q, groups = q.contiguous(), groups.contiguous()
    batch, _, q_heads, head_dim = q.shape
    ratio, parts = q_heads // keys.kv_heads, triton.cdiv(keys.groups, SCAN_GROUPS)
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
        GROUPS=SCAN_GROUPS,
        num_warps=SCAN_WARPS,
        num_stages=SCAN_STAGES,
    )
    return scores
