"""What a Triton kernel tells launch hooks of its cost, as `triton.profiler` reads it."""

from typing import Any

from torch import Tensor

from ridgeplan.roofline.cost import Cost


def launch_metadata(name: str, cost: Cost, operand: Tensor) -> dict[str, Any]:
    """The keys that the profiler reads; flops are filed under the width of the operand."""
    return {"name": name, f"flops{8 * operand.element_size()}": cost.flops, "bytes": cost.bytes}
