"""Triton kernel of `copy_leading`: for each row and head a fixed number of programs, which stride over its entries.

Over PCIe a load takes about 2 us, so some 100 KiB must be in flight: BLOCK words per program, of PROGRAMS in all. More
only wait before the caches, where loads of the kernels beside it then wait too (docs/benchmarks/offload.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32  # in all, unless there are more rows and heads
BLOCK = 2048  # words
WARPS = 8


@triton.jit(do_not_specialize=["source_entries", "out_entries"])
def _copy_leading_kernel(
    source,
    out,
    count,
    source_entries,
    out_entries,
    ENTRY_WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    words = tl.load(count + flat // HEADS).to(tl.int64) * ENTRY_WORDS
    source += flat * source_entries * ENTRY_WORDS
    out += flat * out_entries * ENTRY_WORDS
    for first in range(tl.program_id(1) * BLOCK, words, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(out + at, tl.load(source + at, mask=inside), mask=inside)


def copy_leading_triton(source: Tensor, out: Tensor, count: Tensor) -> None:
    """See `ridgeplan.kernels.residency.leading_copy.copy_leading`."""
    batch, heads, entries = source.shape[:3]
    words = [tensor.view(batch, heads, tensor.shape[2], -1).view(torch.int32) for tensor in (source, out)]
    parts = triton.cdiv(PROGRAMS, batch * heads)
    _copy_leading_kernel[(batch * heads, parts)](
        *words,
        count,
        entries,
        out.shape[2],
        ENTRY_WORDS=words[0].shape[3],
        HEADS=heads,
        PARTS=parts,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
