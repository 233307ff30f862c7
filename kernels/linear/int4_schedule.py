"""How the CUDA kernel of products with 4-bit weights is cut; see linear_plan.py."""

from functools import cache

from ridgeplan.kernels.linear.int4_weight import PAIR_BYTES
from ridgeplan.kernels.linear.schedule import Cut, Format, Machine, Plan

MAX_ROWS = 64  # of x: beyond, reading the codes once for every 16 rows costs more than a dense copy

# In order of preference: the first whose ring is deep enough beside x is taken.
CUTS = (
    Cut(splits=1, item_inputs=4096, least_items=4),
    Cut(splits=1, item_inputs=2048, least_items=4, most_inputs=8192),
    Cut(splits=2, item_inputs=4096, least_items=3),
    Cut(splits=4, item_inputs=4096, least_items=2),
    Cut(splits=8, item_inputs=4096, least_items=2),
    # So many outputs that their sums in a cluster take the room, or gates, which no cluster takes.
    Cut(splits=1, item_inputs=2048, least_items=2),
)


def weight_format(group: int) -> Format:
    """Of weights with one scale per `group` inputs."""
    return Format(
        source="int4.cuh",
        unit_inputs=group,
        unit_bytes=8 * group + PAIR_BYTES,
        padding_bytes=0,
        sum_bytes=4,
        warps=8,
        calm_bytes=32 * 1024,
        flight_bytes=36 * 1024,
        long_flight_bytes=72 * 1024,
        lead=0,
        equal_items=2,
        macros=(f"-DGROUP={group}",),
    )


@cache
def make_plan(
    rows: int, outputs: int, inputs: int, group: int, bf16: bool, gated: bool, machine: Machine
) -> Plan | None:
    """The fewest passes over the codes whose share of x fits shared memory; None if none does."""
    for most_rows in (16, 8, 4, 2, 1):
        for cut in CUTS:
            chunk_rows = min(rows, most_rows)
            plan = Plan(weight_format(group), cut, machine, bf16, rows, outputs, inputs, chunk_rows, gated)
            if plan.fits:
                return plan
    return None
