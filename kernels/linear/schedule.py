"""How a CUDA linear kernel is spread over a device: CTAs, clusters, pipeline stages, shared memory.

docs/kernels/linear.md has the measurements behind the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

from ridgeplan.kernels.device.cuda import config_options
from ridgeplan.kernels.linear.weights import PAIR_BYTES
from ridgeplan.roofline.execution import (
    CUDA_FUSED_SWIGLU_ROWS,
    CUDA_LARGE_GEMM_ROWS,
    CUDA_MANY_CHANNELS,
    CUDA_SKINNY_GEMM_ROWS,
    INTEGER_GROUP,
    MAX_INTEGER_INPUTS,
    MAX_INTEGER_ROWS,
    TILE_OUTPUTS,
    runs_integers,
)

CLUSTER_SIZES = (1, 2, 4, 8)
SUM_BUFFERS = 2  # buffers of an output tile's sums, as in csrc/config.cuh
X_PARTS = 4  # parts in which many rows of x arrive
FEW_ROWS = 1  # up to this many rows, x arrives in one part, and each CTA fetches its own copy
FEW_TILES = 4  # output tiles per CTA: a short product, which gains nothing from more copies in flight
MAX_STAGES = 16  # pipeline stages
# With more rows, fusing SwiGLU may need shorter pipelines or several passes, only to save a small kernel.
MAX_GATED_ROWS = CUDA_FUSED_SWIGLU_ROWS
RESERVED_BYTES = 2 * 1024  # bytes of shared memory reserved per CTA, for the driver and static variables
BESIDE_BYTES = 6 * 1024  # bytes of shared memory left per SM, for CTAs of a small kernel waiting for this one


@dataclass(frozen=True)
class WeightPipeline:
    """How a kernel reads weights, and how many bytes it keeps in flight.

    A K tile is the part of an output tile that a warp processes at once; bytes are those of one output tile.
    """

    bits: int  # 16, 8 or 4
    k_tile_inputs: int
    k_tile_bytes: int
    stage_padding_bytes: int
    x_sum_bytes: int  # sums of x, per K tile and column
    mma_warps: int  # per CTA
    before_x_bytes: int  # in flight before x has arrived
    after_x_bytes: int  # and after, in a short product
    long_after_x_bytes: int  # and in a long one
    trigger_stages: int  # stages left to copy when the next kernel may start
    max_equal_stages: int  # up to this many stages per output tile are made about equal; else all but the last are full
    group: int = 0  # inputs that share a scale


@dataclass(frozen=True)
class SplitK:
    """A split of a product's inputs between the `ways` CTAs of a cluster."""

    ways: int
    stage_inputs: int  # most inputs per stage
    min_stages: int  # fewest stages that must fit beside x
    max_inputs: int = 1 << 30  # most inputs of a weight


@dataclass(frozen=True)
class DeviceLimits:
    """Shared memory per SM, and the number of resident clusters (one CTA per SM), by CLUSTER_SIZES."""

    sm_bytes: int
    clusters: tuple[int, ...]


@dataclass(frozen=True)
class LinearSchedule:
    """A product's launch: concurrent passes over the weight, with at most `rows_per_pass` rows of x each.

    gated: the first half of the outputs are gates. A CTA alternates between tiles of gates and the tiles that these
    multiply, and y is half as wide. integer: products of integers (csrc/integer.cuh), of x in registers.
    """

    weights: WeightPipeline
    split_k: SplitK
    device: DeviceLimits
    bf16: bool
    rows: int
    outputs: int
    inputs: int
    rows_per_pass: int
    gated: bool = False
    integer: bool = False

    @cached_property
    def x_tiles(self) -> int:
        """8-row tiles of x per CTA."""
        return -(-self.rows_per_pass // 8)

    @cached_property
    def passes(self) -> int:
        return -(-self.rows // self.rows_per_pass)

    @cached_property
    def x_multicast(self) -> int:
        """CTAs of a cluster that fetch x together."""
        return 2 if self.split_k.ways == 1 and self.rows_per_pass > FEW_ROWS and not self.integer else 1

    @cached_property
    def workers(self) -> int:
        """CTAs (or clusters, if inputs are split) that share the output tiles: all resident, or one per work tile."""
        needed = -(-self._work_tiles // self.x_multicast)
        return min(max(1, self.max_clusters // self.passes), needed) * self.x_multicast

    @cached_property
    def _work_tiles(self) -> int:
        """Output tiles; if gated, pairs of a gate's tile and the one that it multiplies."""
        return -(-self.outputs // (2 * TILE_OUTPUTS if self.gated else TILE_OUTPUTS))

    @cached_property
    def max_clusters(self) -> int:
        """Resident clusters."""
        return self.device.clusters[CLUSTER_SIZES.index(self.split_k.ways * self.x_multicast)]

    @cached_property
    def max_tiles(self) -> int:
        """Most output tiles per CTA."""
        return -(-self._work_tiles // self.workers) * (2 if self.gated else 1)

    @cached_property
    def k_tiles(self) -> int:
        """Most K tiles per CTA and output tile."""
        return -(-self.inputs // self.weights.k_tile_inputs // self.split_k.ways)

    @cached_property
    def stage_inputs(self) -> int:
        cta_inputs, step = self.k_tiles * self.weights.k_tile_inputs, max(64, self.weights.k_tile_inputs)
        count = -(-cta_inputs // self.split_k.stage_inputs)
        if count > self.weights.max_equal_stages:
            return self.split_k.stage_inputs
        return -(-cta_inputs // (count * step)) * step

    @cached_property
    def stage_bytes(self) -> int:
        k_tiles = self.stage_inputs // self.weights.k_tile_inputs
        return k_tiles * self.weights.k_tile_bytes + self.weights.stage_padding_bytes

    @cached_property
    def mma_warps(self) -> int:
        """The format's number of warps, or one fewer if that divides full stages evenly."""
        warps, k_tiles = self.weights.mma_warps, self.stage_inputs // self.weights.k_tile_inputs
        return warps - 1 if k_tiles % warps and k_tiles % (warps - 1) == 0 and k_tiles >= 2 * warps else warps

    @cached_property
    def other_bytes(self) -> int:
        """Shared memory beside the pipeline: sums of warps, of x and of the cluster, and rows of x."""
        columns, ways = 8 * self.x_tiles, self.split_k.ways
        cluster_tiles = -(-self.max_tiles // ways) * ways if ways > 1 else 0
        x_row_bytes = 0 if self.integer else 2 * self.k_tiles * self.weights.k_tile_inputs + 64
        x_bytes = self.rows_per_pass * x_row_bytes
        x_sum_bytes = self.k_tiles * self.weights.x_sum_bytes * columns
        return (SUM_BUFFERS * self.mma_warps + cluster_tiles) * 4 * TILE_OUTPUTS * columns + x_sum_bytes + x_bytes

    @cached_property
    def stages(self) -> int:
        """Pipeline stages that fit."""
        available_bytes = self.device.sm_bytes - BESIDE_BYTES - RESERVED_BYTES - self.other_bytes
        return min(MAX_STAGES, available_bytes // self.stage_bytes)

    @cached_property
    def fits(self) -> bool:
        has_room = self.stages >= self.split_k.min_stages and self.passes <= self.max_clusters
        whole_pairs = self.outputs % (2 * TILE_OUTPUTS) == 0
        can_gate = self.split_k.ways == 1 and whole_pairs and self.rows <= MAX_GATED_ROWS
        return has_room and (can_gate or not self.gated) and self.inputs <= self.split_k.max_inputs

    @cached_property
    def shared_bytes(self) -> int:
        return self.other_bytes + self.stages * self.stage_bytes

    @cached_property
    def stages_before_x(self) -> int:
        """Stages in flight at once before x has arrived."""
        return min(self.stages, max(1, self.weights.before_x_bytes // self.stage_bytes))

    @cached_property
    def stages_after_x(self) -> int:
        """Stages in flight at once after x has arrived."""
        is_short = self.max_tiles <= FEW_TILES
        in_flight_bytes = self.weights.after_x_bytes if is_short else self.weights.long_after_x_bytes
        return min(self.stages, max(1, in_flight_bytes // self.stage_bytes))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Grid of CTAs: workers times split inputs, passes."""
        return self.workers * self.split_k.ways, self.passes, 1

    @property
    def threads(self) -> int:
        """Threads per CTA: MMA warps, the producer warp and the epilogue warp."""
        return 32 * (self.mma_warps + 2)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The compiled variant: `LinearConfig` in csrc/config.cuh."""
        cta_inputs = self.k_tiles * self.weights.k_tile_inputs
        x_stages = -(-cta_inputs // self.stage_inputs)
        in_parts = self.rows_per_pass > FEW_ROWS and not self.integer
        return tuple(
            config_options(
                WEIGHT_BITS=self.weights.bits,
                WEIGHT_GROUP=self.weights.group,
                BF16=self.bf16,
                X_TILES=self.x_tiles,
                SPLIT_K=self.split_k.ways,
                X_MULTICAST=self.x_multicast,
                X_PARTS=min(X_PARTS, x_stages) if in_parts else 1,
                MMA_WARPS=self.mma_warps,
                STAGE_INPUTS=self.stage_inputs,
                MAX_STAGES=MAX_STAGES,
                FUSE_SWIGLU=self.gated,
                INTEGER=self.integer,
                TILE_STAGES=x_stages if self.integer else 1,
                WHOLE_STAGES=self.inputs % self.stage_inputs == 0,
            )
        )


K_TILE_INPUTS = 32
MAX_DENSE_ROWS = CUDA_SKINNY_GEMM_ROWS
NARROW_INPUTS = 768  # with fewer, reducing and storing sums dominates, and the library is as fast for half as many rows

FORMAT = WeightPipeline(
    bits=16,
    k_tile_inputs=K_TILE_INPUTS,
    k_tile_bytes=2 * TILE_OUTPUTS * K_TILE_INPUTS,
    stage_padding_bytes=64 * TILE_OUTPUTS,
    x_sum_bytes=0,
    mma_warps=4,
    before_x_bytes=68 * 1024,
    after_x_bytes=68 * 1024,
    long_after_x_bytes=1 << 20,
    trigger_stages=3,
    max_equal_stages=1 << 20,
)


def splits(bits: int) -> tuple[SplitK, ...]:
    """In order of preference: the first is used whose pipeline is deep enough beside x.

    A stage holds as many bytes with any number of bits; products with dense weights need one more in flight.
    """
    inputs, more = 16384 // bits, 1 if bits == 16 else 0
    return (
        SplitK(ways=1, stage_inputs=inputs, min_stages=4),
        SplitK(ways=1, stage_inputs=inputs // 2, min_stages=4, max_inputs=8192),
        SplitK(ways=2, stage_inputs=inputs, min_stages=3 + more),
        SplitK(ways=4, stage_inputs=inputs, min_stages=2 + more),
        SplitK(ways=8, stage_inputs=inputs, min_stages=2 + more),
        # For outputs whose sums would fill a cluster's shared memory, and for gated ones, which are never split.
        SplitK(ways=1, stage_inputs=inputs // 2, min_stages=2),
    )


@cache
def make_dense_schedule(
    rows: int, outputs: int, inputs: int, bf16: bool, gated: bool, device: DeviceLimits
) -> LinearSchedule | None:
    """One pass over the weight, with x in shared memory; None if none fits, or if the library is as fast."""
    narrow = inputs < NARROW_INPUTS and outputs > CUDA_MANY_CHANNELS
    few_rows = CUDA_LARGE_GEMM_ROWS // 2 if narrow else CUDA_LARGE_GEMM_ROWS
    if rows > MAX_DENSE_ROWS or (rows > few_rows and max(inputs, outputs) > CUDA_MANY_CHANNELS):
        return None
    schedules = (
        LinearSchedule(FORMAT, split, device, bf16, rows, outputs, inputs, rows, gated) for split in splits(16)
    )
    return next((schedule for schedule in schedules if schedule.fits), None)


ROWS_PER_PASS = (16, 8, 4, 2, 1)


def weight_format(group: int, bits: int = 4) -> WeightPipeline:
    """The format of weights with one scale per `group` inputs, in each of their 4-bit planes."""
    return WeightPipeline(
        bits=bits,
        k_tile_inputs=group,
        k_tile_bytes=bits // 4 * (8 * group + PAIR_BYTES),
        stage_padding_bytes=0,
        x_sum_bytes=4,
        mma_warps=8,
        before_x_bytes=32 * 1024,
        after_x_bytes=36 * 1024,
        long_after_x_bytes=72 * 1024,
        trigger_stages=0,
        max_equal_stages=2,
        group=group,
    )


@cache
def make_quantized_schedule(
    rows: int, outputs: int, inputs: int, group: int, bf16: bool, gated: bool, device: DeviceLimits, bits: int = 4
) -> LinearSchedule | None:
    """The fewest passes over the codes for which each pass's rows of x fit shared memory; None if none does."""
    for max_rows in ROWS_PER_PASS:
        for split in splits(bits):
            rows_per_pass, weights = min(rows, max_rows), weight_format(group, bits)
            schedule = LinearSchedule(weights, split, device, bf16, rows, outputs, inputs, rows_per_pass, gated)
            if schedule.fits:
                return schedule
    return None


@cache
def make_integer_schedule(
    rows: int, outputs: int, inputs: int, bf16: bool, gated: bool, device: DeviceLimits, bits: int
) -> LinearSchedule | None:
    """Products of integers with weights in groups of 128: the next kernel may start as soon as x has arrived.

    None for more than 4 rows or 14336 inputs.
    """
    weights = replace(
        weight_format(INTEGER_GROUP, bits),
        max_equal_stages=0,
        trigger_stages=-1,
        before_x_bytes=35 * 1024,
        after_x_bytes=69 * 1024,
        long_after_x_bytes=69 * 1024,
    )
    split = SplitK(ways=1, stage_inputs=2048, min_stages=4)
    schedule = LinearSchedule(weights, split, device, bf16, rows, outputs, inputs, rows, gated, integer=True)
    return schedule if schedule.fits and rows <= MAX_INTEGER_ROWS and inputs <= MAX_INTEGER_INPUTS else None


def choose_quantized_schedule(
    rows: int, outputs: int, inputs: int, group: int, bf16: bool, gated: bool, device: DeviceLimits, bits: int = 4
) -> LinearSchedule | None:
    """The faster of `make_integer_schedule` and `make_quantized_schedule`."""
    schedule = None
    if group == INTEGER_GROUP and runs_integers(bits, rows, inputs):
        schedule = make_integer_schedule(rows, outputs, inputs, bf16, gated, device, bits)
    return schedule or make_quantized_schedule(rows, outputs, inputs, group, bf16, gated, device, bits)
