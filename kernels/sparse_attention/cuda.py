"""CUDA C++ kernels of attention to chosen tokens (csrc/): by an index list, and progressive."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.device.cuda import (
    KernelParams,
    compile_kernel,
    config_options,
    is_packed,
    launch_with_pdl,
    may_start_early,
    pack_strides,
    program,
)
from ridgeplan.kernels.kv_cache.cuda import GROUP, QuantizedPlanes
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.cuda import STAGES, THREADS, WARPS, ScanVariant, parts_of, scan_variant
from ridgeplan.kernels.selection.draft_planes import DraftPlanes

TILE = 16  # tokens
TILES = 3  # of a warp: one that it attends to, and those that are being copied
MAX_ROWS = 4096  # (batch row, KV head) pairs, whose counters are allocated once
POINTERS = (
    *("q", "keys", "values", "begin", "end", "groups"),
    *("arrivals", "partial", "part_max", "part_sum", "out", "value_rows"),
)
CHOICE = ("index", "count", "k", "two_bit", "middles")
SIZES = ("batch", "kv_heads", "capacity", "group_capacity", "parts", "sinks", "sets", "index_capacity", "page")
STRIDES = (
    *("q_batch_stride", "q_head_stride"),
    *(f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")),
)
NO_CHOICE = MappingProxyType(
    {**dict.fromkeys(CHOICE, None), **dict.fromkeys(("sinks", "sets", "index_capacity", "page"), 0)}
)


class SparseParams(KernelParams):
    """See csrc/config.cuh."""

    constants = MappingProxyType({"THREADS": THREADS, "WARPS": WARPS, "TILE": TILE, "TILES": TILES, "GROUP": GROUP})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_void_p) for name in CHOICE),
        *((name, ctypes.c_int) for name in (*SIZES, *STRIDES)),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class SparseVariant(ScanVariant):
    """What a compiled kernel is specialized for."""

    @property
    def options(self) -> list[str]:
        """The compiled variant: `SparseConfig` in csrc/config.cuh."""
        return [*super().options, *config_options(TILE_BYTES=self.tile_bytes)]

    @property
    def tile_bytes(self) -> int:
        """A tile of chosen tokens: codes, and the group's scales and minima."""
        return 2 * TILE * self.head_dim // 2 + 2 * 2 * (self.head_dim + GROUP)

    def shared_bytes(self, buffers: int) -> int:
        """Dynamic shared memory of a CTA whose warps have `buffers` bytes each, and later their results in it."""
        return WARPS * max(buffers, 4 * self.entries)

    @property
    def entries(self) -> int:
        """Sums over values of a partial result; query heads come in pairs."""
        return (self.heads + 1) // 2 * 2 * self.head_dim


@dataclass(frozen=True)
class SparseKernel:
    """A kernel compiled for a variant on one device.

    shared_bytes: dynamic shared memory of a CTA, whatever it reads. group_bytes: more for each of its groups, of which
    it may have max_groups (None: any number). arrivals: int32 [MAX_ROWS], which calls leave at zero. Calls on one
    device must not overlap (on several streams, for example): they share them.
    """

    compiled: Any
    variant: SparseVariant
    num_sms: int
    shared_bytes: int
    arrivals: Tensor
    group_bytes: int = 0
    max_groups: int | None = None

    def run(self, inputs: AttentionInputs, value_rows: Tensor, choice: dict[str, Any]) -> Tensor:
        """Output [B, 1, Hq, D]. The inputs must have codes. choice: fields by which tokens are chosen."""
        q, keys, values, codes = inputs.q, inputs.keys, inputs.values, inputs.codes
        assert codes is not None, "chosen tokens are read as codes"
        rows = codes.batch * codes.kv_heads
        parts = self.parts(rows, codes.groups)
        shared_bytes = self.shared_bytes + self.group_bytes * -(-codes.groups // parts)
        heads = torch.empty(2, rows, parts, self.variant.heads, dtype=torch.float32, device=q.device)
        partial = torch.empty(rows, parts, self.variant.entries, dtype=torch.float32, device=q.device)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        q_batch_stride, _, *strides = pack_strides(q, keys, values)
        fields = {
            **NO_CHOICE,
            **{name: getattr(inputs, name).contiguous() for name in ("begin", "end", "groups")},
            **dict(zip(SIZES, (codes.batch, codes.kv_heads, keys.shape[2], codes.groups, parts), strict=False)),
            **dict(zip(STRIDES, (q_batch_stride, *strides), strict=True)),
            **choice,
        }
        params = SparseParams(
            q=q,
            keys=keys,
            values=values,
            partial=partial,
            part_max=heads[0],
            part_sum=heads[1],
            out=out,
            value_rows=value_rows,
            key_codes=QuantizedPlanes.of(codes.key_planes),
            value_codes=QuantizedPlanes.of(codes.value_planes),
            arrivals=self.arrivals,
            scale=inputs.scale,
            **fields,
        )
        grid, early = (rows * parts, 1, 1), may_start_early(inputs.groups)
        with torch.cuda.device(q.device):
            launch_with_pdl(self.compiled, grid, (THREADS, 1, 1), params, shared_bytes, early=early)
        return out

    def parts(self, rows: int, groups: int) -> int:
        """CTAs of each of `rows` rows of up to `groups` groups.

        Where a CTA chooses among its own groups it has at least one for each warp: a share of k taken from few groups
        differs much from the best k of the row.
        """
        if self.max_groups is None:
            return parts_of(rows, self.num_sms)
        min_parts = max(1, -(-groups // self.max_groups))
        return max(min_parts, min(parts_of(rows, self.num_sms, min_parts), -(-groups // WARPS)))


def supported_variant(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseVariant | None:
    """The variant for a call, or None: then Triton's kernels run.

    It needs what `scan_variant` does, one dtype, and rows of the buffers that 16-byte loads can read.
    """
    scanned = scan_variant(q, codes.kv_heads, codes.group)
    if scanned is None or keys.dtype != q.dtype or values.dtype != q.dtype:
        return None
    if codes.batch * codes.kv_heads > MAX_ROWS or not is_packed(keys) or not is_packed(values):
        return None
    return SparseVariant(scanned.head_dim, scanned.heads, scanned.bf16)


@cache
def compiled_kernel(
    source: str,
    entry: str,
    variant: SparseVariant,
    device: torch.device,
    buffers: int,
    group_bytes: int = 0,
    max_groups: int | None = None,
) -> SparseKernel | None:
    """The kernel `entry`, whose warps have `buffers` bytes each. None, with one warning, if it does not compile."""
    shared_bytes = variant.shared_bytes(buffers)
    fallback = f"the CUDA kernel {entry} does not compile, Triton's run instead"
    largest = shared_bytes + group_bytes * (max_groups or 0)
    text = program(source, SparseParams)
    compiled = compile_kernel(text, entry, variant.options, device, shared_bytes=largest, fallback=fallback)
    if compiled is None:
        return None
    arrivals = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return SparseKernel(compiled, variant, num_sms, shared_bytes, arrivals, group_bytes, max_groups)


INDEX_LIST_SOURCE, INDEX_LIST_ENTRY = "sparse_attention/csrc/index_list.cu", "index_list"


def find_index_list_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseKernel | None:
    """The kernel that computes this call, or None: then Triton's does."""
    variant = supported_variant(q, keys, values, codes)
    return (
        None
        if variant is None
        else compiled_kernel(INDEX_LIST_SOURCE, INDEX_LIST_ENTRY, variant, q.device, TILES * variant.tile_bytes)
    )


def index_list_attention_cuda(
    kernel: SparseKernel, inputs: AttentionInputs, index: Tensor, count: Tensor, value_rows: Tensor, page: int
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.sparse_decode_attention`."""
    sizes = {"sets": index.shape[1], "index_capacity": index.shape[2], "page": page}
    lists = {"index": index.contiguous(), "count": count.contiguous()}
    return kernel.run(inputs, value_rows.contiguous(), lists | sizes)


PROGRESSIVE_SOURCE, PROGRESSIVE_ENTRY = "sparse_attention/csrc/progressive.cu", "progressive"
GROUP_BYTES = 2 * GROUP  # bins of a group's scores
MAX_GROUPS = 512  # of a CTA
RESERVED_BYTES = 1024  # shared memory of an SM that the driver keeps
STATIC_BYTES = 15 * 1024  # shared memory of a CTA beside its warps' buffers and the bins, at most


def buffer_bytes(variant: SparseVariant) -> int:
    """A warp's buffers: groups to scan, then tiles of chosen tokens."""
    return max(STAGES * variant.stage_bytes, TILES * variant.tile_bytes)


def max_groups(variant: SparseVariant, cta_bytes: int) -> int:
    """Groups of a CTA whose bins fit into its shared memory of `cta_bytes`."""
    return min(MAX_GROUPS, (cta_bytes - STATIC_BYTES - variant.shared_bytes(buffer_bytes(variant))) // GROUP_BYTES)


def find_progressive_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> SparseKernel | None:
    """The kernel that computes this call, or None: then the separate kernels do."""
    variant = supported_variant(q, keys, values, codes)
    if variant is None:
        return None
    sm_bytes = torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor
    groups = max_groups(variant, sm_bytes - RESERVED_BYTES)
    if groups < 1:
        return None
    return compiled_kernel(
        PROGRESSIVE_SOURCE, PROGRESSIVE_ENTRY, variant, q.device, buffer_bytes(variant), GROUP_BYTES, groups
    )


def progressive_attention_cuda(
    kernel: SparseKernel, inputs: AttentionInputs, planes: DraftPlanes, k: Tensor, sinks: int
) -> Tensor:
    """See `ridgeplan.kernels.sparse_attention.progressive_attention`."""
    rows, groups, _, _ = planes.key_two_bit.flatten(0, 1).shape
    middles = torch.empty(rows, groups, kernel.variant.column_heads, dtype=torch.float32, device=k.device)
    fields = {"two_bit": planes.key_two_bit, "middles": middles, "k": k.contiguous(), "sinks": sinks}
    return kernel.run(inputs, planes.value_rows, fields)
