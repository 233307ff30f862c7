"""Triton kernel of `copy_leading`: for each row and head a fixed number of programs, which stride over its entries.

Over PCIe a load takes about 2 us, so some 100 KiB must be in flight: BLOCK words per program, of PROGRAMS in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # in all: two per SM of a Hopper GPU
BLOCK = 4096  # words
WARPS = 8


@triton.jit(do_not_specialize=["row_words"])
def _copy_leading_kernel(
    source, out, count, entry_words, row_words, HEADS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    flat = tl.program_id(0).to(tl.int64)
    words = tl.load(count + flat // HEADS).to(tl.int64) * entry_words
    source += flat * row_words
    out += flat * row_words
    for first in range(tl.program_id(1) * BLOCK, words, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(out + at, tl.load(source + at, mask=inside), mask=inside)


def copy_leading_triton(source: Tensor, out: Tensor, count: Tensor) -> None:
    """See `ridgeplan.kernels.residency.leading_copy.copy_leading`."""
    batch, heads, entries = source.shape[:3]
    source_words, out_words = (tensor.view(batch, heads, entries, -1).view(torch.int32) for tensor in (source, out))
    entry_words, parts = source_words.shape[3], triton.cdiv(PROGRAMS, batch * heads)
    _copy_leading_kernel[(batch * heads, parts)](
        source_words,
        out_words,
        count,
        entry_words,
        entries * entry_words,
        HEADS=heads,
        PARTS=parts,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
