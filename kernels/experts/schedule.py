"""How the CUDA kernel of routed experts is spread over a device: items, warps, pipeline stages, shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from ridgeplan.kernels.device.cuda import config_options
from ridgeplan.kernels.linear.schedule import BESIDE_BYTES, MAX_STAGES, RESERVED_BYTES, SUM_BUFFERS
from ridgeplan.kernels.linear.weights import MXFP4_GROUP, PAIR_BYTES
from ridgeplan.roofline.execution import TILE_OUTPUTS

COLUMNS = 8  # most pairs of a block: columns of a product of the tensor cores
BLOCK_BYTES = 4 * (2 + COLUMNS)  # of a block in shared memory: its expert, its number of pairs, and these
MAX_BLOCKS = 512
MAX_TILES = 4  # output tiles of an item
MIN_STAGES = 3  # fewest for which the next block's x waits in shared memory, too
# Of an SM: most bytes of a stage, unless an item's least tiles take more, and bytes in flight before x has arrived;
# after it twice as many. By measurement (docs/kernels/experts.md).
STAGE_BYTES = 36 * 1024
PAIRS_PER_EXPERT = 16  # with more on average, blocks of 16 pairs read the weights less often; measured up to 8


@dataclass(frozen=True)
class CodeFormat:
    """How weights are stored. A K tile is what a warp multiplies at once of an output tile's inputs.

    whole_tiles: rows are contiguous, so a stage holds whole output tiles. has_x_sums: products need the sum of x over
    each K tile. mma_warps: of a CTA, at most; ctas_per_sm: unless shared memory holds one only. Both by measurement.
    """

    bits: int
    group: int
    k_tile_inputs: int
    k_tile_bytes: int
    x_padding_bytes: int
    whole_tiles: bool = False
    has_x_sums: bool = True
    mma_warps: int = 8
    ctas_per_sm: int = 1


def tiled_format(bits: int, group: int) -> CodeFormat:
    """Codes in the order of `ridgeplan.kernels.linear.weights`."""
    k_tile_bytes = bits // 4 * (8 * group + PAIR_BYTES)
    return CodeFormat(bits, group, group, k_tile_bytes, x_padding_bytes=64, ctas_per_sm=2 if bits == 4 else 1)


MXFP4 = CodeFormat(
    4, MXFP4_GROUP, 64, TILE_OUTPUTS * (32 + 64 // MXFP4_GROUP), x_padding_bytes=16, whole_tiles=True,
    has_x_sums=False, mma_warps=12,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertsSchedule:
    """A product's launch. outputs, inputs: of an expert; blocks: of up to `block_rows` pairs each.

    An item is the work of a block and a few output tiles: of `gated` products half of them are of gates and half of
    what these multiply. Each CTA takes a contiguous range of all items.
    """

    weights: CodeFormat
    bf16: bool
    outputs: int
    inputs: int
    gated: bool
    blocks: int
    block_rows: int
    num_sms: int
    sm_bytes: int
    ctas_per_sm: int

    @cached_property
    def k_tiles(self) -> int:
        return self.inputs // self.weights.k_tile_inputs

    @cached_property
    def expert_tiles(self) -> int:
        """Output tiles of an expert."""
        return self.outputs // TILE_OUTPUTS

    @cached_property
    def tiles(self) -> int:
        """Output tiles of an item: as many as a stage holds, unless fewer spread more evenly over the CTAs."""
        least, tile_bytes = 2 if self.gated else 1, self.k_tiles * self.weights.k_tile_bytes
        more = [
            tiles
            for tiles in range(2 * least, MAX_TILES + 1, least)
            if self.expert_tiles % tiles == 0 and tiles * tile_bytes <= self.cta_bytes(STAGE_BYTES)
        ]
        return min((least, *more), key=lambda tiles: (self._most_tiles(tiles), -tiles))

    def _most_tiles(self, tiles: int) -> int:
        """Most output tiles of a CTA with items of `tiles`, if all blocks hold pairs."""
        items = self.blocks * self.expert_tiles // tiles
        return -(-items // self.ctas) * tiles

    @cached_property
    def warps_per_tile(self) -> int:
        """MMA warps that split the inputs of each of an item's tiles."""
        return max(1, min(self.weights.mma_warps // self.tiles, self.k_tiles))

    @cached_property
    def stage_k_tiles(self) -> int:
        """K tiles of each tile in a stage; all but an item's last stage have as many."""
        if self.weights.whole_tiles:
            return self.k_tiles
        most = max(1, self.cta_bytes(STAGE_BYTES) // (self.tiles * self.weights.k_tile_bytes))
        return -(-self.k_tiles // -(-self.k_tiles // most))

    @cached_property
    def stage_bytes(self) -> int:
        return self.tiles * self.stage_k_tiles * self.weights.k_tile_bytes

    @cached_property
    def ctas(self) -> int:
        return self.num_sms * self.ctas_per_sm

    def cta_bytes(self, sm_bytes: int) -> int:
        """A CTA's part of bytes of an SM."""
        return sm_bytes // self.ctas_per_sm

    @cached_property
    def x_buffers(self) -> int:
        """Blocks whose x is in shared memory at once."""
        return 2 if self._stages(2) >= MIN_STAGES else 1

    @cached_property
    def stages(self) -> int:
        """Pipeline stages that fit."""
        return self._stages(self.x_buffers)

    def _stages(self, x_buffers: int) -> int:
        cta_bytes = self.cta_bytes(self.sm_bytes - BESIDE_BYTES) - RESERVED_BYTES
        return min(MAX_STAGES, (cta_bytes - self._other_bytes(x_buffers)) // self.stage_bytes)

    def _other_bytes(self, x_buffers: int) -> int:
        """Shared memory beside the pipeline: sums of warps and of x, rows of x, and blocks."""
        sum_bytes = SUM_BUFFERS * self.tiles * self.warps_per_tile * 4 * TILE_OUTPUTS * COLUMNS
        x_sum_bytes = 2 * self.tiles * self.k_tiles * 4 * COLUMNS if self.weights.has_x_sums else 0
        padding = self.weights.x_padding_bytes
        x_row_bytes = 2 * self.inputs + padding if 2 * self.inputs % (2 * padding) == 0 else 2 * self.inputs
        return sum_bytes + x_sum_bytes + x_buffers * self.block_rows * x_row_bytes + self.blocks * BLOCK_BYTES

    @cached_property
    def fits(self) -> bool:
        whole = self.inputs % self.weights.k_tile_inputs == 0 and self.outputs % (TILE_OUTPUTS * self.tiles) == 0
        return whole and 0 < self.blocks <= MAX_BLOCKS and self.stages >= 2

    @cached_property
    def shared_bytes(self) -> int:
        return self._other_bytes(self.x_buffers) + self.stages * self.stage_bytes

    @cached_property
    def stages_before_x(self) -> int:
        """Stages in flight at once before the first block's x has arrived."""
        return min(self.stages, max(1, self.cta_bytes(STAGE_BYTES) // self.stage_bytes))

    @cached_property
    def stages_after_x(self) -> int:
        """Stages in flight at once after that; with one, each copy would wait for the one before."""
        return min(self.stages, max(2, self.cta_bytes(2 * STAGE_BYTES) // self.stage_bytes))

    @property
    def threads(self) -> int:
        """Threads per CTA: MMA warps, the producer warp and the epilogue warp."""
        return 32 * (self.tiles * self.warps_per_tile + 2)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The compiled variant: `ExpertsConfig` in csrc/experts.cu."""
        return tuple(
            config_options(
                WEIGHT_BITS=self.weights.bits,
                WEIGHT_GROUP=self.weights.group,
                MXFP4=self.weights.whole_tiles,
                BF16=self.bf16,
                INPUTS=self.inputs,
                STAGE_INPUTS=self.stage_k_tiles * self.weights.k_tile_inputs,
                TILES=self.tiles,
                MMA_WARPS=self.warps_per_tile,
                MAX_STAGES=MAX_STAGES,
                GATED=self.gated,
                CTAS_PER_SM=self.ctas_per_sm,
            )
        )


@cache
def make_experts_schedule(
    weights: CodeFormat,
    bf16: bool,
    outputs: int,
    inputs: int,
    gated: bool,
    blocks: int,
    block_rows: int,
    num_sms: int,
    sm_bytes: int,
) -> ExpertsSchedule | None:
    """The schedule of one product; None if its sizes or its rows of x do not fit."""
    sizes = weights, bf16, outputs, inputs, gated, blocks, block_rows, num_sms, sm_bytes
    by_ctas = (ExpertsSchedule(*sizes, ctas_per_sm) for ctas_per_sm in range(weights.ctas_per_sm, 0, -1))
    return next((schedule for schedule in by_ctas if schedule.fits), None)
