"""CUDA C++ kernels of decode attention for Hopper (csrc/): schedules, arguments and launches.

docs/kernels/attention.md explains how they work and what was measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.cuda import (
    KernelParams,
    compile_kernel,
    config_options,
    has_wgmma,
    is_on_hopper,
    is_packed,
    launch_with_pdl,
    may_start_early,
    pack_strides,
    program,
)
from ridgeplan.kernels.kv_cache.cuda import GROUP, HEAD_DIMS, QuantizedPlanes
from ridgeplan.kernels.kv_cache.layout import PageTable

CTAS_PER_SM = {8: 3, 16: 3, 24: 3, 32: 2, 64: 2}  # resident at once, by query rows
WGMMA_CTAS_PER_SM = {24: 3, 32: 3, 64: 2}  # the same, of the query rows whose products with codes wgmma computes
MIN_CTAS_PER_SM = 3  # that there is shared memory for; short rows fill it with fewer and the next kernel's
MIN_TILES_PER_CTA = 4  # with fewer KV tiles per CTA, fewer CTAs are resident
MIN_GRID_FILL = 0.9  # least share of the resident CTAs that a grid fills
MAX_CTAS = 65535  # so that the tile scheduler can use 32-bit arithmetic
RESERVED_BYTES = 1024  # shared memory per CTA that the driver keeps
MIN_STAGES = 2  # one is read while all others are being filled
MAX_STAGES = 12  # more pipeline stages hide no more latency
MAX_FUSED_ELEMENTS = 16384  # partials of a KV head that its last CTA reduces; the kernel `merge` takes more
MERGED_TOGETHER = 8  # partials in flight per thread of the kernel `merge` (BATCH in csrc/epilogue.cuh)
MERGE_GROUPS = 16  # of threads in a CTA of the kernel `merge`, each with some splits of a query row
MERGE_PARTS = (1, 4, 16)  # groups that share a query row, of which a kernel is compiled for each
SUMMED = {"logits": 1, "probabilities": 2}  # values of SCORES in csrc/config.cuh
BY_QUERY = 3  # the same, of probabilities with a sum for each of up to MAX_SCORED_QUERIES queries
MAX_SCORED_QUERIES = 8  # the columns of a tensor-core product
MAX_FUSED_KV_ROWS = 4096  # arrival counters: (batch row, KV head) pairs whose reduction may be fused


@dataclass(frozen=True)
class AttentionVariant:
    """What a compiled kernel is specialized for.

    bits: 0 without codes. rows: query rows, a key of CTAS_PER_SM. scores: left of each token, see csrc/scores.cuh.
    paged: whether a table has the pages of groups, `PageTable`. sinks: whether a logit of each head joins its softmax.
    warpgroup: whether the warps of a CTA multiply codes together, by wgmma, with the rows of WGMMA_CTAS_PER_SM only.
    """

    head_dim: int
    bits: int
    bf16: bool
    rows: int
    scores: int = 0
    paged: bool = False
    sinks: bool = False
    warpgroup: bool = False

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs per SM.

        Four hide the latencies of INT4, whose tiles are short; full precision, all copies, takes few with deep
        pipelines.
        """
        if self.bits == 0:
            return 2 if self.head_dim == 128 or self.rows == 64 else 3
        if self.warpgroup:
            return WGMMA_CTAS_PER_SM[self.rows]
        return 4 if self.rows == 8 and (self.bits == 4 or self.head_dim == 128) else CTAS_PER_SM[self.rows]

    @property
    def dense_tile(self) -> int:
        """Full-precision tokens of a KV tile: about the bytes of a group."""
        return 32 if self.bits == 4 else 64

    @property
    def stage_bytes(self) -> int:
        """A stage of the pipeline: a group's keys or values with their scales, or a dense tile's."""
        return self.dense_tile * 2 * self.head_dim + 512

    def stages(self, cta_bytes: int) -> int:
        """Stages of a CTA that may use `cta_bytes` of shared memory."""
        return min(MAX_STAGES, (cta_bytes - self.shared_bytes(0) - self.static_bytes(MAX_STAGES)) // self.stage_bytes)

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory of a CTA: the pipeline, staged queries and probabilities."""
        return stages * self.stage_bytes + self.rows * (2 * self.head_dim + 2 * GROUP)

    def static_bytes(self, stages: int) -> int:
        """At most the static shared memory: mbarriers, where a row's tokens lie, what warps share about query rows, and
        scores of a tile."""
        queries = MAX_SCORED_QUERIES if self.scores == BY_QUERY else 1
        return 8 * stages + 256 + 64 * self.rows + (4 * (GROUP + 4) * queries if self.scores else 0)

    def options(self, stages: int, merge_parts: int = MERGE_GROUPS) -> list[str]:
        """The compiled variant of either kernel: `AttentionConfig` in csrc/config.cuh."""
        return config_options(
            HEAD_DIM=self.head_dim,
            BITS=self.bits,
            BF16=self.bf16,
            Q_TILES=self.rows // 8,
            CTAS_PER_SM=self.ctas_per_sm,
            STAGES=stages,
            DENSE_TILE=self.dense_tile,
            SCORES=self.scores,
            PAGED=self.paged,
            SINKS=self.sinks,
            WARPGROUP=self.warpgroup,
            MERGE_PARTS=merge_parts,
        )


@dataclass(frozen=True)
class Occupancy:
    """How CTAs of a variant fill a device. sm_bytes: shared memory of an SM."""

    variant: AttentionVariant
    num_sms: int
    sm_bytes: int

    @cached_property
    def stages(self) -> int:
        """Stages of a CTA's pipeline, with which the variant's CTAs are resident."""
        return self.variant.stages(self.sm_bytes // self.variant.ctas_per_sm - RESERVED_BYTES)

    @property
    def fits(self) -> bool:
        """Whether an SM has the shared memory for the shortest pipelines. GPUs after Hopper may have less of it."""
        return self.stages >= MIN_STAGES

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory that a CTA needs."""
        return self.variant.shared_bytes(self.stages)

    @cached_property
    def max_shared_bytes(self) -> int:
        """At least what a CTA is ever launched with, padding included."""
        return max(self.shared_bytes, self.sm_bytes // MIN_CTAS_PER_SM - RESERVED_BYTES)

    def residency(self, tiles: int) -> tuple[int, int]:
        """CTAs that the device is to hold at once, and dynamic shared memory of each: padded where more would fit.

        tiles: KV tiles of the call, at most. What a CTA does before its first tile and after its last takes as long as
        several tiles, and merging grows with the splits, so short rows want fewer CTAs: of codes down to one for each
        SM. Full precision was not timed with as few.
        """
        max_ctas = self.variant.ctas_per_sm
        fewest = 1 if self.variant.bits else MIN_CTAS_PER_SM
        ctas = min(max_ctas, max(fewest, tiles // (self.num_sms * MIN_TILES_PER_CTA)))
        sharing = min(max_ctas, max(MIN_CTAS_PER_SM, ctas))
        available_bytes = self.sm_bytes // sharing - RESERVED_BYTES - self.variant.static_bytes(MAX_STAGES)
        return ctas * self.num_sms, self.shared_bytes if sharing == max_ctas else available_bytes // 16 * 16

    def grid(self, kv_rows: int, row_tiles: int) -> tuple[int, int]:
        """CTAs for `kv_rows` (batch row, KV head) pairs of at most `row_tiles` KV tiles each; their shared memory.

        As many as are resident, or slightly fewer where rows of one length then divide evenly. Not many fewer: CTAs
        that start early, as those before them end, would crowd on some SMs.
        """
        resident, shared_bytes = self.residency(kv_rows * row_tiles)
        even = resident // kv_rows * kv_rows
        return min(MAX_CTAS, even if even >= MIN_GRID_FILL * resident else resident), shared_bytes


def fuses_reduction(ctas: int, kv_rows: int, elements: int) -> bool:
    """Whether a row's last CTA reduces the row's splits, of `elements` each; else a kernel of its own does."""
    return kv_rows <= MAX_FUSED_KV_ROWS and -(-ctas // kv_rows) * elements <= MAX_FUSED_ELEMENTS


def merge_parts(ctas: int, kv_rows: int) -> int:
    """Groups of threads of the kernel `merge` that share a query row: one per batch of loads, as far as there are."""
    splits = -(-ctas // kv_rows) + 1  # a row may begin and end within a CTA
    return next((parts for parts in MERGE_PARTS if splits <= parts * MERGED_TOGETHER), MERGE_GROUPS)


SOURCES = {"attend": "attention/csrc/attention.cu", "merge": "attention/csrc/merge.cu"}  # of the kernels
MAX_ROWS = 64  # query rows (query heads of a KV head times queries) of one CTA
THREADS = 128
TENSORS = (
    "q", "keys", "values", "begin", "end", "groups", "partial", "lse", "row_ctas", "out", "arrivals", "pages", "buffers"
)  # fmt: skip
SCORE_TENSORS = ("scores", "score_lse")
SIZES = ("batch", "kv_heads", "q_heads_per_kv", "queries", "capacity", "group_capacity")
SCORE_SIZES = ("score_queries", "score_capacity", "score_step")
STRIDES = (
    *("q_batch_stride", "q_query_stride", "q_head_stride"),
    *(f"{x}_{axis}stride" for x in ("key", "value") for axis in ("batch_", "head_", "")),
)


class AttentionParams(KernelParams):
    """See csrc/config.cuh."""

    constants = MappingProxyType({"GROUP": GROUP, "THREADS": THREADS, "MERGE_GROUPS": MERGE_GROUPS})

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*TENSORS, *SCORE_TENSORS, "sinks")),
        ("key_codes", QuantizedPlanes),
        ("value_codes", QuantizedPlanes),
        *((name, ctypes.c_int) for name in (*SIZES, *STRIDES, "fuse_reduction")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in (*SCORE_SIZES, "page_stride")),
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
        self, inputs: AttentionInputs, splits: int | None, scores: ScoreRequest | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `ridgeplan.kernels.attention.decode_attention`."""
        q, keys, values = inputs.q, inputs.keys, inputs.values
        batch, queries, _, head_dim = q.shape
        sizes = (batch, inputs.kv_heads, inputs.ratio, queries, keys.shape[2], inputs.group_capacity)
        kv_rows, rows = batch * inputs.kv_heads, inputs.ratio * queries
        ctas, shared_bytes = self._grid(kv_rows, sizes, splits)
        fused = fuses_reduction(ctas, kv_rows, rows * head_dim)
        lengths = {"begin": inputs.begin, "end": inputs.end, "groups": inputs.groups}
        written = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        outputs = self._outputs(written, kv_rows, rows, ctas)
        params = AttentionParams(
            q=q,
            keys=keys,
            values=values,
            **{name: None if length is None else length.contiguous() for name, length in lengths.items()},
            **outputs,
            **_score_fields(scores, queries),
            **_page_fields(inputs.pages),
            sinks=None if inputs.sinks is None else inputs.sinks.float().contiguous(),
            key_codes=QuantizedPlanes.of(inputs.key_planes),
            value_codes=QuantizedPlanes.of(inputs.value_planes),
            **dict(zip(SIZES, sizes, strict=True)),
            **dict(zip(STRIDES, pack_strides(q, keys, values), strict=True)),
            fuse_reduction=int(fused),
            scale=inputs.scale,
        )
        early = may_start_early(*lengths.values())
        with torch.cuda.device(q.device):
            launch_with_pdl(self.attend, (ctas, 1, 1), (THREADS, 1, 1), params, shared_bytes, early=early)
            if not fused:
                parts = merge_parts(ctas, kv_rows)
                grid = -(-rows * parts // MERGE_GROUPS), kv_rows, 1
                launch_with_pdl(self.merges[parts], grid, (MERGE_GROUPS * head_dim // 4, 1, 1), params)
        return written

    def _grid(self, kv_rows: int, sizes: tuple[int, ...], splits: int | None) -> tuple[int, int]:
        """CTAs and the dynamic shared memory of each."""
        *_, capacity, group_capacity = sizes
        row_tiles = group_capacity + -(-capacity // self.occupancy.variant.dense_tile)
        ctas, shared_bytes = self.occupancy.grid(kv_rows, row_tiles)
        return ctas if splits is None else min(MAX_CTAS, splits * kv_rows), shared_bytes

    def _outputs(self, out: Tensor, kv_rows: int, rows: int, ctas: int) -> dict[str, Tensor]:
        """What the kernels write."""
        splits = ctas + kv_rows  # a CTA goes on to a new row at most once per row
        return {
            "partial": torch.empty(splits, rows, out.shape[3], dtype=torch.float32, device=out.device),
            "lse": torch.empty(splits, rows, dtype=torch.float32, device=out.device),
            "row_ctas": torch.empty(kv_rows, 2, dtype=torch.int32, device=out.device),
            "out": out,
            "arrivals": self.arrivals,
        }


def find_attention_kernel(inputs: AttentionInputs, scores: ScoreRequest | None = None) -> AttentionKernel | None:
    """The kernel that computes this call, or None: then Triton's does.

    It needs Hopper or newer, codes in groups of 128, head_dim 64 or 128, at most 64 query rows per KV head, one 16-bit
    dtype, rows of the buffers that 16-byte copies can move, a positive scale, and no cap or window. Scores of each
    query must be probabilities of at most MAX_SCORED_QUERIES queries.
    """
    q, codes, rows = inputs.q, inputs.codes, inputs.q.shape[1] * inputs.ratio
    tensors = q, inputs.keys, inputs.values
    if inputs.soft_cap or inputs.window is not None:
        return None
    if not is_on_hopper(q) or inputs.scale <= 0 or (codes is not None and codes.group != GROUP):
        return None
    if q.shape[3] not in HEAD_DIMS or rows > MAX_ROWS or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if any(tensor.dtype != q.dtype or not is_packed(tensor) for tensor in tensors):
        return None
    padded_rows = next(size for size in CTAS_PER_SM if size >= rows)
    if scores is not None and scores.rows == "each":
        if scores.what != "probabilities" or q.shape[1] > MAX_SCORED_QUERIES:
            return None
        summed = BY_QUERY
    else:
        summed = 0 if scores is None else SUMMED[scores.what]
    paged = inputs.pages is not None
    sinks, bf16 = inputs.sinks is not None, q.dtype == torch.bfloat16
    # With scores, pages or sinks, wgmma has not run yet.
    usual = inputs.bits > 0 and scores is None and not paged and not sinks
    warpgroup = usual and padded_rows in WGMMA_CTAS_PER_SM and has_wgmma(q.device)
    variant = AttentionVariant(q.shape[3], inputs.bits, bf16, padded_rows, summed, paged, sinks, warpgroup)
    return _compiled(variant, q.device)


@cache
def _compiled(variant: AttentionVariant, device: torch.device) -> AttentionKernel | None:
    """None where an SM is too small for the variant and, with one warning, where a kernel does not compile."""
    properties = torch.cuda.get_device_properties(device)
    occupancy = Occupancy(variant, properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
    if not occupancy.fits:
        return None
    fallback = "the CUDA attention kernel does not compile, Triton's runs instead"

    def compiled(kernel: str, shared_bytes: int, parts: int = MERGE_GROUPS) -> Any | None:
        options, text = variant.options(occupancy.stages, parts), program(SOURCES[kernel], AttentionParams)
        return compile_kernel(
            text, kernel, options, device, shared_bytes=shared_bytes, fallback=fallback, arch_specific=variant.warpgroup
        )

    attend = compiled("attend", occupancy.max_shared_bytes)
    merges = {parts: compiled("merge", 0, parts) for parts in MERGE_PARTS}
    if attend is None or None in merges.values():
        return None
    return AttentionKernel(attend, merges, occupancy, torch.zeros(MAX_FUSED_KV_ROWS, dtype=torch.int32, device=device))


def _page_fields(table: PageTable | None) -> dict[str, Tensor | int | None]:
    if table is None:
        return {"pages": None, "buffers": None, "page_stride": 0}
    return {"pages": table.pages, "buffers": table.buffers, "page_stride": table.pages.stride(0)}


def _score_fields(request: ScoreRequest | None, queries: int) -> dict[str, Tensor | int | None]:
    if request is None:
        return dict.fromkeys(SCORE_TENSORS) | dict.fromkeys(SCORE_SIZES, 0)
    tensors, sizes = (request.out, request.lse), (*request.by_query.shape[2:], request.step(queries))
    return dict(zip(SCORE_TENSORS, tensors, strict=True)) | dict(zip(SCORE_SIZES, sizes, strict=True))
