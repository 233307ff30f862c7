"""CUDA C++ kernel of decode attention over hierarchical codes and full precision, compiled at first use.

How it works (source: attention_*.cu in the order of SOURCES, then attention.cu). All (batch row, KV head)
pairs' quantized groups and blocks of full-precision slots form one list, which the resident blocks of the GPU share
equally; a block meets a row as one segment. A row's few segments are merged by the block that finishes last; where
they are many, a second kernel merges them. Lengths are read on the device, so a captured graph stays valid.

The four warps of a block work on one group at a time, out of a ring of bulk copies. Codes become fp16 by OR-ing them
into a mantissa and feed mma.m16n8k16 as its 16-row operand (S^T = K Q^T, O^T = V^T P^T), query rows being columns. A
warp computes the scores of a quarter of the tokens; weights are exchanged through shared memory; a warp adds up a
quarter of the channels. So each code is unpacked once, whatever the number of queries. The order of tokens inside a
group is chosen so that transposed stores of scores are the operands of the values as their codes are packed. A warp
stages weights before it knows whether a score outgrew the running reference: one barrier carries that vote, and the
rare group that needs it is done again.

Numerics. Queries are brought to [-1, 1] by a power of two per row before they meet a group's key scales (fp16
scales are at most 65504, so nothing overflows), weights carry 2 ** 5, value scales are divided by a running power of
two. Codes of values are centred exactly before they are multiplied; what codes of keys hold too much cancels within a
group, against products of the same rounded operands, in fp32. Sums of weights, and of weights times centres, are
ordinary fp32 additions.

Launches are early ones (see launch.py): before earlier kernels have ended a block reads lengths and fills its ring with
codes, so that memory is busy while those end. Everything else waits.

Calls of one variant on one device must not overlap (on several streams, say): they share the counters of arrivals.

Log on one H200 (one query, 32/8 heads of 128, 128k tokens and a buffer of 200 unless said; us). First, with a fill that
clears the cache between calls (cuDNN in bf16 without the buffer takes 134):
- groups of its own for each warp, or a team of two for 17 to 32 rows, both of which unpacked every code: INT4 48, INT8
  77; 8 queries predicted 1.2 times one query, measured 1.75 (135).
- tokens and channels split over the warps of a block as above: 8 queries predicted 100, measured 114. Addresses kept
  from the compiler's rematerialization, every warp copying a part of its own, two blocks without spills: 106 to 112.
- codes loaded into registers before the barriers: slower. Five or six blocks for INT4: no faster.
- the merge by the last block: 32 rows of 4k tokens 66, then 55. For 66 segments a second kernel is faster (54, 57).
- full precision through the same ring: 1.08 of cuDNN with 16 bytes copied by a thread, 1.06 with a bulk copy per token.
Then in a chain of calls over rotating inputs of 700 MB in one graph (cuDNN 127; 32/32 heads, 256k: 944):
- INT4's values cancelled by one product of the weights, as before, were wrong by 0.9 to 1.5% from 64k tokens on, since
  tensor cores truncate large sums. Centred pair by pair: 0.18%, and no slower.
- early launches: predicted 5 to 6 less, measured 43 for 48 (INT4), 47 for 53 (32 rows of 4k), 10 for 13 (14/2 heads of
  64, 16 rows of 4k). But blocks that start as others end crowd on the processors that empty first: grids of two thirds
  of the resident blocks, chosen to divide rows evenly, became slower by up to a fifth. So grids are nearly full.
- full precision in bulk copies of eight tokens: predicted cuDNN's time, measured 1.07 as before (1018 at 256k), as
  copies whose lines in shared memory and in memory do not match move more. Padded by 64 bytes, though ldmatrix then has
  conflicts: 991; keys read without it: 985; two blocks instead of three: 980, and 129 at 128k. Not padded: 1367. Hints
  to evict first: nothing.
- 8 queries and INT8 (103; one query 70): eight warps a block, predicted 85, measured 117 (more instructions by two
  fifths, more issued by a sixth); three blocks, 110; scaling the next group's queries among the products of values,
  102, but one query slower by 2%. One mma takes 6 to 7 cycles of a scheduler and 24 to finish, so a third of the time;
  a warp issues every 5 cycles, of which 1.3 are fixed latencies, 0.6 shared memory, 0.6 copies, 0.4 tensor cores.
- 5 and 6 queries of 4 heads in 24 rows instead of 32: predicted a quarter less arithmetic, measured 89 instead of 98
  with two blocks, 85 with three.
- head_dim 64: five to eight blocks for INT4, units of 64 full-precision tokens: no faster. A call has 6 to 9 beyond
  what grows with tokens: clocks inside of it (14/2 heads, 16 rows of 4k, INT4, 9.8) say 0.5 until the end of the last
  one is seen, 0.5 for queries, 1.5 for the first unit and 1 for each further one, 0.8 for partials, 0.6 to arrive, 2
  for the merge; where units are of full precision 1.5 more, for the issue of their copies. Predicted 1 to 2 less,
  measured: the first references set before weights are staged once in vain, 0.1 to 0.4 less for INT8 and bf16 but 5%
  more for INT4 at 32k; 16 partials in flight instead of 8, barriers set up by all warps, fewer copies issued before
  the first unit: nothing.
- three blocks instead of four where each has less than four units: one row of 32/8 heads and 4k 8.1 and 9.4 become 7.6
  and 8.7 (INT4, INT8), 16k 14.3 and 16.1 become 13.7 and 15.5, 9/3 heads of 64 and 16 rows of 4k 12.1 becomes 11.1. Two
  blocks: slower for most, and so are three from nine units on.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.schedule import BLOCKS, FOLDED_HEADS, GROUP, MAX_BLOCKS, Occupancy, Variant, folds
from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compiled, joined
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

HEAD_DIMS = (64, 128)
MAX_ROWS = 64  # query rows (query heads of a KV head times queries) of one block
THREADS = 128
MERGE_PARTS = 16
ALIGNMENT = 8  # elements of 16 bytes: the least that bulk copies move
SOURCES = ("config", "tile_scheduler", "softmax", "quantized_kv", "dense_kv", "epilogue")


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels of a variant on one device."""

    attend: Any
    merge: Any
    occupancy: Occupancy
    arrived: Tensor  # a zero per (batch row, KV head), which calls leave zero


def source() -> str:
    """CUDA C++ of both kernels."""
    return joined("attention", *(f"{part}.cuh" for part in SOURCES), "attention.cu")


@cache
def _kernels(variant: Variant, device: torch.device) -> Kernels | None:
    """Compiles a variant, or None (with a warning, once) where that fails."""
    found = torch.cuda.get_device_properties(device)
    occupancy = Occupancy(variant, found.multi_processor_count, found.shared_memory_per_multiprocessor)
    failing = "the CUDA attention kernel does not compile, Triton's runs instead"
    attend, merge = (
        compiled(source(), name, variant.options(occupancy.items, name), device, shared_bytes=most, failing=failing)
        for name, most in (("attend", occupancy.most_shared_bytes), ("merge", 0))
    )
    if attend is None or merge is None:
        return None
    return Kernels(attend, merge, occupancy, torch.zeros(FOLDED_HEADS, dtype=torch.int32, device=device))


def _variant(q: Tensor, keys: Tensor, codes: QuantizedKV | None, lower: bool) -> Variant:
    rows = q.shape[1] * q.shape[2] // keys.shape[1]
    bits = 0 if codes is None else 8 if lower else 4
    return Variant(q.shape[3], bits, q.dtype == torch.bfloat16, next(size for size in BLOCKS if size >= rows))


def fits(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV | None, lower: bool, scale: float) -> bool:
    """Whether the CUDA kernel computes this call; what it does not, Triton's does.

    It needs Hopper or newer, codes in groups of 128, head_dim 64 or 128, at most 64 query rows per KV head,
    one 16-bit dtype, rows of the buffers that 16-byte copies can move, and a positive scale.
    """
    if not q.is_cuda or torch.version.cuda is None or scale <= 0 or (codes is not None and codes.group != GROUP):
        return False
    if q.shape[3] not in HEAD_DIMS or q.shape[1] * q.shape[2] > MAX_ROWS * keys.shape[1]:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return False
    if torch.cuda.get_device_capability(q.device) < (9, 0) or not all(map(_aligned, (q, keys, values))):
        return False
    return _kernels(_variant(q, keys, codes, lower), q.device) is not None


def _aligned(tensor: Tensor) -> bool:
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any(s % ALIGNMENT for s in strides[:-1])


def decode_attention_cuda(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: Tensor,
    end: Tensor,
    codes: QuantizedKV | None,
    groups: Tensor | None,
    lower: bool,
    scale: float,
    splits: int | None,
) -> Tensor:
    """See `ridgeplan.kernels.attention.decode_attention`; only for calls that `fits`."""
    kernels = _kernels(_variant(q, keys, codes, lower), q.device)
    assert kernels is not None
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    kv_rows, rows = batch * kv_heads, q_heads // kv_heads * queries
    group_capacity = 0 if codes is None else codes.groups
    units = group_capacity + -(-capacity // kernels.occupancy.variant.slots)
    blocks, shared_bytes = kernels.occupancy.grid(kv_rows, units)
    blocks = blocks if splits is None else min(MAX_BLOCKS, splits * kv_rows)
    segments = blocks + kv_rows  # a block's share meets a new row at most once per row
    folded = folds(blocks, kv_rows, rows * head_dim)
    given = [begin, end, begin if groups is None else groups]
    lengths = [length.contiguous() for length in given]
    shape = [batch, kv_heads, q_heads // kv_heads, queries, capacity, group_capacity]
    strides = [s // ALIGNMENT for tensor in (q, keys, values) for s in tensor.stride()[:3]]
    partial = torch.empty(segments, rows, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(segments, rows, dtype=torch.float32, device=q.device)
    shares = torch.empty(kv_rows, 2, dtype=torch.int32, device=q.device)  # the first and last that a row's units are in
    out = torch.empty(batch, queries, q_heads, head_dim, dtype=q.dtype, device=q.device)
    written = [partial, sums, shares, out, kernels.arrived]
    planes = [q] * len(fields(QuantizedKV)) if codes is None else codes.arguments  # any pointer will do for none
    with torch.cuda.device(q.device):
        launch_with_pdl(
            kernels.attend,
            (blocks, 1, 1),
            (THREADS, 1, 1),
            [q, keys, values, *lengths, *written, *planes, *shape, *strides, int(folded), float(scale)],
            shared_bytes,
            early=all(length.is_contiguous() for length in given),  # copies are too new to be read before the wait
        )
        if not folded:
            merged: list[Tensor | int] = [partial, sums, shares, *lengths, out, *shape]
            launch_with_pdl(kernels.merge, (rows, kv_rows, 1), (MERGE_PARTS * head_dim // 4, 1, 1), merged)
    return out
