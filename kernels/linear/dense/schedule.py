"""Schedules of the CUDA kernel of products with dense 16-bit weights."""

from functools import cache

from ridgeplan.kernels.linear.schedule import TILE_OUTPUTS, DeviceLimits, LinearSchedule, SplitK, WeightFormat
from ridgeplan.roofline.execution import CUDA_LARGE_GEMM_ROWS, CUDA_MANY_CHANNELS, CUDA_SKINNY_GEMM_ROWS

K_TILE_INPUTS = 32
MAX_ROWS = CUDA_SKINNY_GEMM_ROWS
NARROW_INPUTS = 768  # with fewer, reducing and storing sums dominates, and the library is as fast for half as many rows

FORMAT = WeightFormat(
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

# In order of preference: the first is used whose pipeline is deep enough beside x.
SPLITS = (
    SplitK(ways=1, stage_inputs=1024, min_stages=4),
    SplitK(ways=1, stage_inputs=512, min_stages=4, max_inputs=8192),
    SplitK(ways=2, stage_inputs=1024, min_stages=4),
    SplitK(ways=4, stage_inputs=1024, min_stages=3),
    SplitK(ways=8, stage_inputs=1024, min_stages=3),
    # For outputs whose sums would fill a cluster's shared memory, and for gated ones, which are never split.
    SplitK(ways=1, stage_inputs=512, min_stages=2),
)


@cache
def make_schedule(
    rows: int, outputs: int, inputs: int, bf16: bool, gated: bool, device: DeviceLimits
) -> LinearSchedule | None:
    """One pass over the weight, with x in shared memory; None if none fits, or if the library is as fast."""
    narrow = inputs < NARROW_INPUTS and outputs > CUDA_MANY_CHANNELS
    few_rows = CUDA_LARGE_GEMM_ROWS // 2 if narrow else CUDA_LARGE_GEMM_ROWS
    if rows > MAX_ROWS or (rows > few_rows and max(inputs, outputs) > CUDA_MANY_CHANNELS):
        return None
    schedules = (LinearSchedule(FORMAT, split, device, bf16, rows, outputs, inputs, rows, gated) for split in SPLITS)
    return next((schedule for schedule in schedules if schedule.fits), None)
