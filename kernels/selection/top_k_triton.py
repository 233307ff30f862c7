"""Triton kernels of top-k: a radix select over float bits by four histograms, then a compaction in order.

Several programs share a row. Histograms are added with integer atomics, so the result does not depend on their order.
The grid is fixed by the scores' width, and lengths and k are read on the device, for CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PASSES = 4  # digits of 8 bits of a 32-bit key
BINS = tl.constexpr(256)  # values of a digit; a histogram's cost per score grows with its bins
BLOCK = 2048  # scores in flight of a program
CHUNK = 8192  # scores of a program, fewer where that fills the GPU
LEAST_PROGRAMS = 512
WARPS = 8


@triton.jit
def _sort_keys(scores, at, inside):
    """Unsigned integers ordered like the scores; NaN like -inf, -0 like 0."""
    x = tl.load(scores + at, mask=inside, other=0.0)
    x = tl.where(x != x, float("-inf"), tl.where(x == 0, 0.0, x))
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def _find_digit(histogram, wanted):
    """The digit of the `wanted`-th largest key, and how many of the keys with this digit are still wanted."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.max(tl.where(above + counts >= wanted, bins, 0), 0)
    return digit, wanted - tl.sum(tl.where(bins == digit, above, 0), 0)


@triton.jit
def _wanted(lengths, k, row, max_k):
    return tl.maximum(tl.minimum(tl.minimum(tl.load(lengths + row), tl.load(k + row)), max_k), 0)


@triton.jit
def _prefix(histograms, wanted, DIGITS: tl.constexpr):
    """The first DIGITS digits of the key of the last chosen score, as a number, and how many with them are wanted."""
    prefix = tl.zeros([], tl.uint32)
    for i in tl.static_range(DIGITS):
        digit, wanted = _find_digit(histograms + i * BINS, wanted)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return prefix, wanted


@triton.jit(do_not_specialize=["width", "max_k"])
def _histogram_kernel(
    scores, lengths, k, histograms, width, max_k,
    DIGIT: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    wanted = _wanted(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    if (first >= stop) | (wanted == 0):
        return
    histograms += row * PASSES * BINS
    prefix, _ = _prefix(histograms, wanted, DIGIT)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(first, stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < stop
        keys = _sort_keys(scores, row * width + at, inside)
        if DIGIT > 0:
            inside = inside & ((keys >> (32 - 8 * DIGIT)) == prefix)
        digit = ((keys >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
        counts += tl.histogram(digit, BINS, mask=inside)
    tl.atomic_add(histograms + DIGIT * BINS + tl.arange(0, BINS), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["width", "max_k"])
def _count_kernel(
    scores, lengths, k, histograms, counts, width, max_k, PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Each program's number of keys above the last chosen one's, and of those equal to it."""
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = program * CHUNK
    wanted = _wanted(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    counts += (row * tl.num_programs(1) + program) * 2
    above, equal = 0, 0
    if (first < stop) & (wanted > 0):
        last, _ = _prefix(histograms + row * PASSES * BINS, wanted, PASSES)
        for start in range(first, stop, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = _sort_keys(scores, row * width + at, at < stop)
            above += tl.sum(((at < stop) & (keys > last)).to(tl.int32), 0)
            equal += tl.sum(((at < stop) & (keys == last)).to(tl.int32), 0)
    tl.store(counts, above)
    tl.store(counts + 1, equal)


@triton.jit(do_not_specialize=["width", "max_k"])
def _write_kernel(
    scores, lengths, k, histograms, counts, index, count, width, max_k,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = program * CHUNK
    wanted = _wanted(lengths, k, row, max_k)
    stop = tl.minimum(tl.load(lengths + row), first + CHUNK)
    if program == 0:
        tl.store(count + row, wanted)
    if (first >= stop) | (wanted == 0):
        return
    last, equals = _prefix(histograms + row * PASSES * BINS, wanted, PASSES)
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
    """See `ridgeplan.kernels.selection.top_k.top_k`."""
    scores, lengths, k = scores.contiguous(), lengths.contiguous(), k.contiguous()
    rows, width = scores.shape
    chunk = CHUNK if rows * triton.cdiv(width, CHUNK) >= LEAST_PROGRAMS else BLOCK
    programs = triton.cdiv(width, chunk)
    histograms = torch.zeros(rows, PASSES, BINS.value, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, programs, 2, dtype=torch.int32, device=scores.device)
    index = torch.empty(rows, max_k, dtype=torch.int32, device=scores.device)
    count = torch.empty(rows, dtype=torch.int32, device=scores.device)
    grid, sizes = (rows, programs), {"PASSES": PASSES, "BLOCK": BLOCK, "CHUNK": chunk, "num_warps": WARPS}
    given = (scores, lengths, k, histograms)
    for digit in range(PASSES):
        _histogram_kernel[grid](*given, width, max_k, DIGIT=digit, **sizes)
    _count_kernel[grid](*given, counts, width, max_k, **sizes)
    padded = triton.next_power_of_2(programs)
    _write_kernel[grid](*given, counts, index, count, width, max_k, PROGRAMS=padded, **sizes)
    return index, count
