"""CUDA C++ kernels of decode attention over hierarchical codes and full precision (csrc/), compiled at first use.

docs/kernels/attention.md explains how they work and what was measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.schedule import (
    CTAS_PER_SM,
    MAX_CTAS,
    MAX_FUSED_KV_ROWS,
    MERGE_GROUPS,
    MERGE_PARTS,
    AttentionVariant,
    Occupancy,
    fuses_reduction,
    merge_parts,
)
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.kernel_params import KernelParams
from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compile_kernel, program
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantized_planes import GROUP, HEAD_DIMS, QuantizedPlanes, key_planes, value_planes

SOURCE = "attention/csrc/attention.cu"
MAX_ROWS = 64  # query rows (query heads of a KV head times queries) of one CTA
THREADS = 128
ALIGNMENT = 8  # elements of 16 bytes: the least that bulk copies move
TENSORS = ("q", "keys", "values", "begin", "end", "groups", "partial", "lse", "row_ctas", "out", "arrivals")
SCORE_TENSORS = ("scores", "score_lse")
SIZES = ("batch", "kv_heads", "q_heads_per_kv", "queries", "capacity", "group_capacity")
SCORE_SIZES = ("score_capacity", "score_step")
SUMMED = {"logits": 1, "probabilities": 2}  # values of SCORES in csrc/config.cuh
STRIDES = (
    *("q_batch_stride", "q_query_stride", "q_head_stride"),
    *(f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")),
)


class AttentionParams(KernelParams):
    """See csrc/params.cuh."""

    constants = MappingProxyType({"GROUP": GROUP, "THREADS": THREADS, "MERGE_GROUPS": MERGE_GROUPS})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*TENSORS, *SCORE_TENSORS)),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_int) for name in (*SIZES, *SCORE_SIZES, *STRIDES, "fuse_reduction")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class AttentionKernel:
    """The kernels compiled for a variant on one device.

    merges: by the groups of threads that share a query row. arrivals: a counter per (batch row, KV head), kept at zero.

    Calls of one variant on one device must not overlap (on several streams, for example): they share the counters.
    """

    attend: Any
    merges: Mapping[int, Any]
    occupancy: Occupancy
    arrivals: Tensor

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        begin: Tensor,
        end: Tensor,
        codes: QuantizedKV | None,
        groups: Tensor | None,
        scale: float,
        splits: int | None,
        scores: ScoreRequest | None = None,
    ) -> Tensor:
        """See `ridgeplan.kernels.attention.decode_attention`."""
        batch, queries, q_heads, head_dim = q.shape
        kv_heads, capacity = keys.shape[1:3]
        sizes = (batch, kv_heads, q_heads // kv_heads, queries, capacity, 0 if codes is None else codes.groups)
        kv_rows, rows = batch * kv_heads, q_heads // kv_heads * queries
        ctas, shared_bytes = self._grid(kv_rows, sizes, splits)
        fused = fuses_reduction(ctas, kv_rows, rows * head_dim)
        given = {"begin": begin, "end": end, "groups": groups}
        lengths = {name: None if length is None else length.contiguous() for name, length in given.items()}
        outputs = self._outputs(q, kv_rows, rows, ctas)
        params = AttentionParams(
            q=q,
            keys=keys,
            values=values,
            **lengths,
            **outputs,
            **_score_fields(scores, queries),
            key_codes=key_planes(codes),
            value_codes=value_planes(codes),
            **dict(zip(SIZES, sizes, strict=True)),
            **dict(zip(STRIDES, _strides(q, keys, values), strict=True)),
            fuse_reduction=int(fused),
            scale=scale,
        )
        # A copy just made is not yet visible before griddepcontrol.wait.
        early = all(length is None or length.is_contiguous() for length in given.values())
        with torch.cuda.device(q.device):
            launch_with_pdl(self.attend, (ctas, 1, 1), (THREADS, 1, 1), params, shared_bytes, early=early)
            if not fused:
                parts = merge_parts(ctas, kv_rows)
                grid = -(-rows * parts // MERGE_GROUPS), kv_rows, 1
                launch_with_pdl(self.merges[parts], grid, (MERGE_GROUPS * head_dim // 4, 1, 1), params)
        return outputs["out"]

    def _grid(self, kv_rows: int, sizes: tuple[int, ...], splits: int | None) -> tuple[int, int]:
        """CTAs and the dynamic shared memory of each."""
        *_, capacity, group_capacity = sizes
        row_tiles = group_capacity + -(-capacity // self.occupancy.variant.dense_tile)
        ctas, shared_bytes = self.occupancy.grid(kv_rows, row_tiles)
        return ctas if splits is None else min(MAX_CTAS, splits * kv_rows), shared_bytes

    def _outputs(self, q: Tensor, kv_rows: int, rows: int, ctas: int) -> dict[str, Tensor]:
        """What the kernels write."""
        splits = ctas + kv_rows  # a CTA goes on to a new row at most once per row
        return {
            "partial": torch.empty(splits, rows, q.shape[3], dtype=torch.float32, device=q.device),
            "lse": torch.empty(splits, rows, dtype=torch.float32, device=q.device),
            "row_ctas": torch.empty(kv_rows, 2, dtype=torch.int32, device=q.device),
            "out": torch.empty(q.shape, dtype=q.dtype, device=q.device),
            "arrivals": self.arrivals,
        }


def find_kernel(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    codes: QuantizedKV | None,
    lower: bool,
    scale: float,
    scores: ScoreRequest | None = None,
) -> AttentionKernel | None:
    """The kernel that computes this call, or None: then Triton's does.

    It needs Hopper or newer, codes in groups of 128, head_dim 64 or 128, at most 64 query rows per KV head, one 16-bit
    dtype, rows of the buffers that 16-byte copies can move, and a positive scale.
    """
    if not q.is_cuda or torch.version.cuda is None or scale <= 0 or (codes is not None and codes.group != GROUP):
        return None
    if q.shape[3] not in HEAD_DIMS or q.shape[1] * q.shape[2] > MAX_ROWS * keys.shape[1]:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return None
    if torch.cuda.get_device_capability(q.device) < (9, 0) or not all(map(_aligned, (q, keys, values))):
        return None
    return _compiled(_variant(q, keys, codes, lower, scores), q.device)


def _variant(
    q: Tensor, keys: Tensor, codes: QuantizedKV | None, lower: bool, scores: ScoreRequest | None
) -> AttentionVariant:
    rows = q.shape[1] * q.shape[2] // keys.shape[1]
    bits = 0 if codes is None else 8 if lower else 4
    padded_rows = next(size for size in CTAS_PER_SM if size >= rows)
    summed = 0 if scores is None else SUMMED[scores.what]
    return AttentionVariant(q.shape[3], bits, q.dtype == torch.bfloat16, padded_rows, summed)


@cache
def _compiled(variant: AttentionVariant, device: torch.device) -> AttentionKernel | None:
    """None where an SM is too small for the variant and, with one warning, where a kernel does not compile."""
    found = torch.cuda.get_device_properties(device)
    occupancy = Occupancy(variant, found.multi_processor_count, found.shared_memory_per_multiprocessor)
    if not occupancy.fits:
        return None
    text = program(SOURCE, AttentionParams)
    fallback = "the CUDA attention kernel does not compile, Triton's runs instead"

    def compiled(kernel: str, shared_bytes: int, parts: int = MERGE_GROUPS) -> Any | None:
        options = variant.options(occupancy.stages, kernel, parts)
        return compile_kernel(text, kernel, options, device, shared_bytes=shared_bytes, fallback=fallback)

    attend = compiled("attend", occupancy.max_shared_bytes)
    merges = {parts: compiled("merge", 0, parts) for parts in MERGE_PARTS}
    if attend is None or None in merges.values():
        return None
    return AttentionKernel(attend, merges, occupancy, torch.zeros(MAX_FUSED_KV_ROWS, dtype=torch.int32, device=device))


def _score_fields(request: ScoreRequest | None, queries: int) -> dict[str, Tensor | int | None]:
    if request is None:
        return dict.fromkeys(SCORE_TENSORS) | dict.fromkeys(SCORE_SIZES, 0)
    tensors, sizes = (request.out, request.lse), (request.out.shape[2], request.step(queries))
    return dict(zip(SCORE_TENSORS, tensors, strict=True)) | dict(zip(SCORE_SIZES, sizes, strict=True))


def _aligned(tensor: Tensor) -> bool:
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any(s % ALIGNMENT for s in strides[:-1])


def _strides(*tensors: Tensor) -> list[int]:
    """Of all axes but the channels, in units of 16 bytes."""
    return [stride // ALIGNMENT for tensor in tensors for stride in tensor.stride()[:3]]
