"""CUDA C++ kernel of decode attention over hierarchical codes (source: attention.cu), compiled at first use.

How it works. All (batch row, KV head) pairs' quantized groups and blocks of full-precision slots form one list,
which the resident blocks of the GPU share equally; a block meets a row as one segment, and a second kernel merges
segments by their log-sum-exp. Lengths are read on the device, so a captured graph stays valid. A warp (a team of
two or four where the query rows need it) streams groups through its own ring of bulk copies, with no barrier
beyond its team, and does everything in registers: codes become fp16 by OR-ing them into a mantissa and feed
mma.m16n8k16 as its 16-row operand (S^T = K Q^T, O^T = V^T P^T); the order of tokens inside a group is chosen so
that each lane's scores are of the tokens whose value codes it holds.

Numerics. Queries are brought to [-1, 1] by a power of two per row before they meet a group's key scales (fp16
scales are at most 65504, so nothing overflows), weights carry 2 ** 5, value scales are divided by a running power
of two; the codes' offsets cancel against products of the same rounded operands, in fp32.

Log on one H200 (INT4 / INT8, one query, 32/8 heads of 128, 128k tokens and a buffer of 200, calls in a graph;
cuDNN in bf16 without the buffer takes 0.127 ms, the codes' bytes alone 0.033 / 0.064 ms at 4.3 TB/s):
- first version: INT4 predicted 0.040, measured 0.058 / 0.092. About half of a group's instructions were
  conversions, as masks compiled to two instructions; the merge took 10 us, a chain of loads one after another.
- one lop3 per mask, offsets cancelled in the accumulators instead of subtracted from every pair: predicted 1.6
  times fewer instructions, so bound by memory; measured 0.049 / 0.082, where loading without computing takes
  0.048 / 0.080.
- merge with its partials in flight together, even shares of rows, copy sources in shared memory: predicted
  0.041 / 0.074, measured 0.048 / 0.077. From 64k to 256k tokens (32/32 heads) time grows at over 4.2 TB/s, so a
  fixed cost is left: at 4k tokens the kernel takes 10 us and the merge 4, which is why short contexts gain less.
  Not yet known what the 10 us are; an instruction cache that is cold at each launch is one suspect.
- 4 KiB items and three blocks of a multiprocessor for INT4: predicted 0.075 for 32/32 heads at 64k, measured 0.088
  before and after; 0.013 instead of 0.014 at 4k.
- 8 queries (32 rows), INT8: the goal was 1.2 times one query, measured 1.75 (0.135). Both warps of a team unpack
  every code, and a scheduler issues 0.4 instructions a clock from its two warps. To try: split keys by token and
  values by channel between the warps, so that each code is unpacked once.
- the sum of weights and centres is added per group by ordinary additions: in a test of a million tokens a bias of
  about 2e-4 of the mean value showed, put down to tensor cores truncating long sums.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.layout import QuantizedKV

GROUP = 128
HEAD_DIMS = (64, 128)
MAX_ROWS = 64  # query rows (query heads of a KV head times queries) of one block
WARPS = 4
MAX_BLOCKS = 65535  # so that the kernel cuts its work in 32-bit arithmetic
RESERVED_BYTES = 1024 + 128  # of a block's shared memory: the driver's and the kernel's static variables
ALIGNMENT = 8  # elements of 16 bytes: the least that bulk copies move


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is specialized for."""

    head_dim: int
    bits: int
    bf16: bool
    rows: int

    @property
    def tiles(self) -> int:
        """8-row tiles of query rows that one warp computes."""
        return 1 if self.rows <= 8 else 2

    @property
    def team(self) -> int:
        """Warps that share a stream of codes because the query rows need them all."""
        return 1 if self.rows <= 16 else 2 if self.rows <= 32 else 4

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor: three where their registers suffice (INT4 is bound by issue)."""
        return 3 if self.tiles == 1 and self.bits == 4 else 2

    @property
    def item_bytes(self) -> int:
        """One item of the ring: half of a group's codes of keys or values (all of it at 4 KiB), and metadata."""
        code_bytes = GROUP * self.head_dim * self.bits // 8
        return max(4096, code_bytes // 2) + 512

    @property
    def extra_bytes(self) -> int:
        """Shared memory beside the rings: staged queries and their factors."""
        return 8 * self.tiles * self.team * (2 * self.head_dim + 4)

    def items(self, block_bytes: int) -> int:
        """Depth of a team's ring in a block that may use `block_bytes` of shared memory."""
        teams = WARPS // self.team
        return min(32, (block_bytes - self.extra_bytes) // (teams * (self.item_bytes + 16)))

    def shared_bytes(self, items: int) -> int:
        return WARPS // self.team * items * (self.item_bytes + 16) + self.extra_bytes

    def options(self, items: int, entry: str) -> list[str]:
        macros = {
            "HEAD_DIM": self.head_dim,
            "BITS": self.bits,
            "BF16": int(self.bf16),
            "TILES": self.tiles,
            "TEAM": self.team,
            "WARPS": WARPS,
            "BLOCKS": self.blocks,
            "ITEMS": items,
        }
        return [f"-D{name}={value}" for name, value in macros.items()] + [f"-DENTRY_{entry.upper()}"]


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels of a variant on one device."""

    attend: Any
    merge: Any
    shared_bytes: int
    processors: int
    resident: int  # blocks that the device holds at once


@cache
def _kernels(variant: Variant, device: torch.device) -> Kernels | None:
    """Compiles a variant, or None (with a warning, once) where that fails."""
    properties = torch.cuda.get_device_properties(device)
    items = variant.items(properties.shared_memory_per_multiprocessor // variant.blocks - RESERVED_BYTES)
    source = Path(__file__).with_name("attention.cu").read_text(encoding="utf-8")
    try:
        with torch.cuda.device(device):
            attend, merge = (
                torch.cuda._compile_kernel(source, name, nvcc_options=variant.options(items, name))
                for name in ("attend", "merge")
            )
            attend.set_shared_memory_config(variant.shared_bytes(items))
    except (RuntimeError, OSError, AttributeError) as error:
        warnings.warn(f"the CUDA attention kernel does not compile, Triton's runs instead: {error}", stacklevel=2)
        return None
    processors = properties.multi_processor_count
    return Kernels(attend, merge, variant.shared_bytes(items), processors, variant.blocks * processors)


def _variant(q: Tensor, keys: Tensor, codes: QuantizedKV, lower: bool) -> Variant:
    rows = q.shape[1] * q.shape[2] // keys.shape[1]
    return Variant(q.shape[3], 8 if lower else 4, q.dtype == torch.bfloat16, rows)


def fits(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV | None, lower: bool, scale: float) -> bool:
    """Whether the CUDA kernel computes this call; what it does not, Triton's does.

    It needs Hopper or newer, codes in groups of 128, head_dim 64 or 128, at most 64 query rows per KV head,
    one 16-bit dtype, rows of the buffers that 16-byte copies can move, and a positive scale.
    """
    if codes is None or not q.is_cuda or torch.version.cuda is None or scale <= 0:
        return False
    if codes.group != GROUP or q.shape[3] not in HEAD_DIMS or q.shape[1] * q.shape[2] > MAX_ROWS * keys.shape[1]:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return False
    if torch.cuda.get_device_capability(q.device) < (9, 0) or not all(map(_aligned, (q, keys, values))):
        return False
    return _kernels(_variant(q, keys, codes, lower), q.device) is not None


def _aligned(tensor: Tensor) -> bool:
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any(s % ALIGNMENT for s in strides[:-1])


def _blocks(kernels: Kernels, kv_rows: int) -> int:
    """As many as the device holds; fewer where rows of one length then divide evenly and processors stay full."""
    processors = kernels.processors
    even = kernels.resident // kv_rows * kv_rows
    filled = even / (-(-even // processors) * processors) if even > processors else 0
    return even if filled >= 0.9 else kernels.resident


def decode_attention_cuda(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    begin: Tensor,
    end: Tensor,
    codes: QuantizedKV,
    groups: Tensor,
    lower: bool,
    scale: float,
    splits: int | None,
) -> Tensor:
    """See `ridgeplan.kernels.attention.decode_attention`; only for calls that `fits`."""
    kernels = _kernels(_variant(q, keys, codes, lower), q.device)
    assert kernels is not None
    batch, queries, q_heads, head_dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    ratio = q_heads // kv_heads
    blocks = _blocks(kernels, batch * kv_heads) if splits is None else splits * batch * kv_heads
    lengths = [begin.contiguous(), end.contiguous(), groups.contiguous()]
    shape = [batch, kv_heads, ratio, queries, capacity, codes.groups]
    planes = [
        codes.key_upper,
        codes.key_upper if codes.key_lower is None else codes.key_lower,
        codes.key_scale,
        codes.key_min,
        codes.value_upper,
        codes.value_upper if codes.value_lower is None else codes.value_lower,
        codes.value_scale,
        codes.value_min,
    ]
    strides = [s // ALIGNMENT for tensor in (q, keys, values) for s in tensor.stride()[:3]]
    blocks = min(blocks, MAX_BLOCKS)
    segments = blocks + batch * kv_heads  # a block's share meets a new row at most once per row
    partial = torch.empty(segments, ratio * queries, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(segments, ratio * queries, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, queries, q_heads, head_dim, dtype=q.dtype, device=q.device)
    with torch.cuda.device(q.device):
        kernels.attend(
            (blocks, 1, 1),
            (32 * WARPS, 1, 1),
            [q, keys, values, *lengths, partial, sums, *planes, *shape, *strides, float(scale)],
            kernels.shared_bytes,
        )
        kernels.merge(
            (ratio * queries, batch * kv_heads, 1), (128, 1, 1), [partial, sums, *lengths, out, *shape, blocks]
        )
    return out
