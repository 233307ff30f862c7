"""Schedules of the CUDA kernel of products with 4-bit and 8-bit weights."""

from functools import cache

from ridgeplan.kernels.linear.quantized.int4_weight import PAIR_BYTES
from ridgeplan.kernels.linear.schedule import DeviceLimits, LinearSchedule, SplitK, WeightFormat

MAX_ROWS = 64  # rows of x; with more, reading the codes once per 16 rows costs more than a dense copy
ROWS_PER_PASS = (16, 8, 4, 2, 1)


def splits(bits: int) -> tuple[SplitK, ...]:
    """In order of preference: the first is used whose pipeline is deep enough beside x.

    A stage holds as many bytes with any number of bits.
    """
    whole = 16384 // bits
    return (
        SplitK(ways=1, stage_inputs=whole, min_stages=4),
        SplitK(ways=1, stage_inputs=whole // 2, min_stages=4, max_inputs=8192),
        SplitK(ways=2, stage_inputs=whole, min_stages=3),
        SplitK(ways=4, stage_inputs=whole, min_stages=2),
        SplitK(ways=8, stage_inputs=whole, min_stages=2),
        # For outputs whose sums would fill a cluster's shared memory, and for gated ones, which are never split.
        SplitK(ways=1, stage_inputs=whole // 2, min_stages=2),
    )


def weight_format(group: int, bits: int = 4) -> WeightFormat:
    """The format of weights with one scale per `group` inputs, in each of their 4-bit planes."""
    return WeightFormat(
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
        macros=(f"-DGROUP={group}",),
    )


@cache
def make_schedule(
    rows: int, outputs: int, inputs: int, group: int, bf16: bool, gated: bool, device: DeviceLimits, bits: int = 4
) -> LinearSchedule | None:
    """The fewest passes over the codes for which each pass's rows of x fit shared memory; None if none does."""
    for most_rows in ROWS_PER_PASS:
        for split in splits(bits):
            rows_per_pass, weights = min(rows, most_rows), weight_format(group, bits)
            schedule = LinearSchedule(weights, split, device, bf16, rows, outputs, inputs, rows_per_pass, gated)
            if schedule.fits:
                return schedule
    return None
