"""How the CUDA kernel of products with dense 16-bit weights is cut; see linear_plan.py."""

from functools import cache

from ridgeplan.kernels.linear.schedule import ROWS, Cut, Format, Machine, Plan
from ridgeplan.roofline.execution import CUDA_SKINNY_GEMM_ROWS

UNIT_INPUTS = 32
MAX_ROWS = CUDA_SKINNY_GEMM_ROWS
FEW_ROWS = 8
FEW_CHANNELS = 8192  # of inputs and outputs: beyond, the library's product of more than FEW_ROWS rows is as fast
NARROW_INPUTS = 768  # below, adding up and storing what warps found decides: half as many rows

FORMAT = Format(
    source="dense.cuh",
    unit_inputs=UNIT_INPUTS,
    unit_bytes=2 * ROWS * UNIT_INPUTS,
    padding_bytes=64 * ROWS,
    sum_bytes=0,
    warps=4,
    calm_bytes=68 * 1024,
    flight_bytes=68 * 1024,
    long_flight_bytes=1 << 20,
    lead=3,
    equal_items=1 << 20,
)

# In order of preference: the first whose ring is deep enough beside x is taken.
CUTS = (
    Cut(splits=1, item_inputs=1024, least_items=4),
    Cut(splits=1, item_inputs=512, least_items=4, most_inputs=8192),
    Cut(splits=2, item_inputs=1024, least_items=4),
    Cut(splits=4, item_inputs=1024, least_items=3),
    Cut(splits=8, item_inputs=1024, least_items=3),
    # So many outputs that their sums in a cluster take the room, or gates, which no cluster takes.
    Cut(splits=1, item_inputs=512, least_items=2),
)


@cache
def make_plan(rows: int, outputs: int, inputs: int, bf16: bool, gated: bool, machine: Machine) -> Plan | None:
    """One pass over the weight, whose x fits shared memory; None if none does, or the library's product is as fast."""
    few_rows = FEW_ROWS // 2 if inputs < NARROW_INPUTS and outputs > FEW_CHANNELS else FEW_ROWS
    if rows > MAX_ROWS or (rows > few_rows and max(inputs, outputs) > FEW_CHANNELS):
        return None
    plans = (Plan(FORMAT, cut, machine, bf16, rows, outputs, inputs, rows, gated) for cut in CUTS)
    return next((plan for plan in plans if plan.fits), None)
