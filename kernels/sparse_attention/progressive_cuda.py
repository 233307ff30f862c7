"""CUDA C++ kernel of progressive attention (csrc/), compiled at first use: scan, choice and attention in one launch.

Scores are compared in steps of 1/32 of a power of two, and all tokens whose step is at least the k-th's are read, so a
few more than k may be.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.kernel_params import KernelParams
from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compile_kernel, program
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantized_planes import GROUP, HEAD_DIMS, QuantizedPlanes, key_planes, value_planes
from ridgeplan.kernels.selection.draft_planes import DraftPlanes

SOURCE, ENTRY = "sparse_attention/csrc/progressive.cu", "progressive"
THREADS, WARPS, BINS = 512, 16, 2048
MAX_HEADS = 8  # query heads of a KV head
MAX_ROWS = 4096  # (batch row, KV head) pairs: their counters and histograms
STATIC_BYTES = 14 << 10  # at most the kernel's static shared memory
RESERVED_BYTES = 1024  # shared memory per CTA that the driver keeps
ALIGNMENT = 8  # elements of 16 bytes
INPUTS = ("q", "keys", "values", "begin", "end", "groups", "k", "lse", "histogram", "arrivals")
OUTPUTS = ("partial", "part_max", "part_sum", "scan_sum", "out")
PLANES = ("two_bit", "value_rows")
SIZES = ("batch", "kv_heads", "capacity", "group_capacity", "parts", "sinks")
STRIDES = (
    *("q_batch_stride", "q_head_stride"),
    *(f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")),
)


class ProgressiveParams(KernelParams):
    """See csrc/params.cuh."""

    constants = MappingProxyType({"THREADS": THREADS, "BINS": BINS, "GROUP": GROUP})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*INPUTS, *OUTPUTS, *PLANES)),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_int) for name in (*SIZES, *STRIDES)),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class ProgressiveVariant:
    """What a compiled kernel is specialized for. heads: query heads of a KV head."""

    head_dim: int
    heads: int
    bf16: bool

    @property
    def options(self) -> list[str]:
        """Compile-time configuration (csrc/config.cuh)."""
        return [f"-DHEAD_DIM={self.head_dim}", f"-DHEADS={self.heads}", f"-DBF16={int(self.bf16)}"]

    def shared_bytes(self, groups: int) -> int:
        """Dynamic shared memory of a CTA with `groups` groups: their tokens' scores, later the warps' results."""
        return max(2 * GROUP * groups, 4 * WARPS * self.heads * self.head_dim)


def parts_of(rows: int, num_sms: int) -> int:
    """CTAs of a row: all CTAs are resident at once, where a row's wait for each other."""
    return max(1, num_sms // rows)


@dataclass(frozen=True)
class ProgressiveKernel:
    """The kernel compiled for a variant on one device, with its counters, which calls leave at zero.

    Calls on one device must not overlap (on several streams, for example): they share the counters.
    """

    compiled: Any
    variant: ProgressiveVariant
    num_sms: int
    max_shared_bytes: int
    histogram: Tensor
    arrivals: Tensor

    def fits(self, rows: int, groups: int) -> bool:
        """Whether `rows` rows of `groups` groups fit the counters and a CTA's shared memory."""
        own = -(-groups // parts_of(rows, self.num_sms))
        return rows <= MAX_ROWS and self.variant.shared_bytes(own) <= self.max_shared_bytes

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        begin: Tensor,
        end: Tensor,
        codes: QuantizedKV,
        planes: DraftPlanes,
        groups: Tensor,
        k: Tensor,
        lse: Tensor,
        sinks: int,
        scale: float,
    ) -> Tensor:
        """See `ridgeplan.kernels.sparse_attention.progressive.progressive_attention`."""
        rows = codes.batch * codes.kv_heads
        parts = parts_of(rows, self.num_sms)
        heads = torch.empty(3, rows, parts, self.variant.heads, dtype=torch.float32, device=q.device)
        partial = torch.empty(*heads.shape[1:], q.shape[3], dtype=torch.float32, device=q.device)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        sizes = (codes.batch, codes.kv_heads, keys.shape[2], codes.groups, parts, sinks)
        lengths = {"begin": begin, "end": end, "groups": groups, "k": k}
        params = ProgressiveParams(
            q=q,
            keys=keys,
            values=values,
            **{name: tensor.contiguous() for name, tensor in lengths.items()},
            lse=lse,
            histogram=self.histogram,
            arrivals=self.arrivals,
            partial=partial,
            part_max=heads[0],
            part_sum=heads[1],
            scan_sum=heads[2],
            out=out,
            two_bit=planes.key_two_bit,
            value_rows=planes.value_rows,
            key_codes=key_planes(codes),
            value_codes=value_planes(codes),
            **dict(zip(SIZES, sizes, strict=True)),
            **dict(zip(STRIDES, _strides(q, keys, values), strict=True)),
            scale=scale,
        )
        shared_bytes = self.variant.shared_bytes(-(-codes.groups // parts))
        with torch.cuda.device(q.device):
            launch_with_pdl(self.compiled, (rows * parts, 1, 1), (THREADS, 1, 1), params, shared_bytes)
        return out


def find_kernel(q: Tensor, keys: Tensor, values: Tensor, codes: QuantizedKV) -> ProgressiveKernel | None:
    """The kernel that computes this call, or None: then the separate kernels do.

    It needs Hopper or newer, codes in groups of 128, head_dim 64 or 128, at most 8 query heads per KV head, one 16-bit
    dtype, rows of the buffers that 16-byte loads can read, and scores that fit the shared memory.
    """
    if not q.is_cuda or torch.version.cuda is None or codes.group != GROUP or q.shape[3] not in HEAD_DIMS:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return None
    heads = q.shape[2] // codes.kv_heads
    if heads > MAX_HEADS or torch.cuda.get_device_capability(q.device) < (9, 0):
        return None
    if not all(map(_aligned, (q, keys, values))):
        return None
    kernel = _compiled(ProgressiveVariant(q.shape[3], heads, q.dtype == torch.bfloat16), q.device)
    return kernel if kernel is not None and kernel.fits(codes.batch * codes.kv_heads, codes.groups) else None


@cache
def _compiled(variant: ProgressiveVariant, device: torch.device) -> ProgressiveKernel | None:
    """None, with one warning, if the kernel does not compile."""
    found = torch.cuda.get_device_properties(device)
    max_shared_bytes = found.shared_memory_per_multiprocessor - RESERVED_BYTES - STATIC_BYTES
    fallback = "the CUDA kernel of progressive attention does not compile, Triton's run instead"
    text = program(SOURCE, ProgressiveParams)
    kernel = compile_kernel(text, ENTRY, variant.options, device, shared_bytes=max_shared_bytes, fallback=fallback)
    if kernel is None:
        return None
    histogram = torch.zeros(MAX_ROWS, BINS, dtype=torch.int32, device=device)
    arrivals = torch.zeros(MAX_ROWS, 2, dtype=torch.int32, device=device)
    return ProgressiveKernel(kernel, variant, found.multi_processor_count, max_shared_bytes, histogram, arrivals)


def _aligned(tensor: Tensor) -> bool:
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any(s % ALIGNMENT for s in strides[:-1])


def _strides(q: Tensor, keys: Tensor, values: Tensor) -> list[int]:
    """Of all axes but the channels (and of q's queries), in units of 16 bytes."""
    strides = (q.stride(0), q.stride(2), *keys.stride()[:3], *values.stride()[:3])
    return [stride // ALIGNMENT for stride in strides]
