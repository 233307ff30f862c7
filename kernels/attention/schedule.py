"""How the CUDA kernel of decode attention fills a device: variants, resident CTAs, shared memory, the grid.

docs/kernels/attention.md has the measurements behind the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ridgeplan.kernels.kv_cache.quantized_planes import GROUP

CTAS_PER_SM = {8: 3, 16: 3, 24: 3, 32: 2, 64: 2}  # resident at once, by query rows
MIN_CTAS_PER_SM = 3
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
MAX_FUSED_KV_ROWS = 4096  # arrival counters: (batch row, KV head) pairs whose reduction may be fused


@dataclass(frozen=True)
class AttentionVariant:
    """What a compiled kernel is specialized for.

    bits: 0 without codes. rows: query rows, a key of CTAS_PER_SM. scores: left of each token, see csrc/scores.cuh.
    """

    head_dim: int
    bits: int
    bf16: bool
    rows: int
    scores: int = 0

    @property
    def ctas_per_sm(self) -> int:
        """Resident CTAs per SM.

        Four hide the latencies of INT4, whose tiles are short; full precision, all copies, takes few with deep
        pipelines.
        """
        if self.bits == 0:
            return 2 if self.head_dim == 128 or self.rows == 64 else 3
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
        return 8 * stages + 256 + 64 * self.rows + (4 * GROUP if self.scores else 0)

    def options(self, stages: int, kernel: str, merge_parts: int = MERGE_GROUPS) -> list[str]:
        """Compile-time configuration (csrc/config.cuh) of one of the kernels, "attend" or "merge"."""
        macros = {
            "HEAD_DIM": self.head_dim,
            "BITS": self.bits,
            "BF16": int(self.bf16),
            "Q_TILES": self.rows // 8,
            "CTAS_PER_SM": self.ctas_per_sm,
            "STAGES": stages,
            "DENSE_TILE": self.dense_tile,
            "SCORES": self.scores,
            "MERGE_PARTS": merge_parts,
        }
        return [f"-D{name}={value}" for name, value in macros.items()] + [f"-DKERNEL_{kernel.upper()}"]


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
        several tiles, so short rows want fewer CTAs.
        """
        most = self.variant.ctas_per_sm
        ctas = min(most, max(MIN_CTAS_PER_SM, tiles // (self.num_sms * MIN_TILES_PER_CTA)))
        available_bytes = self.sm_bytes // ctas - RESERVED_BYTES - self.variant.static_bytes(MAX_STAGES)
        return ctas * self.num_sms, self.shared_bytes if ctas == most else available_bytes // 16 * 16

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
