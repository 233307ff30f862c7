"""The cost of a Triton kernel as launch hooks get it, in the keys that `triton.profiler` reads."""

from typing import Any

from torch import Tensor

from ridgeplan.roofline.cost import Cost


def launch_metadata(name: str, cost: Cost, operand: Tensor) -> dict[str, Any]:
    """Name, bytes, and flops under a key with the bits of the operand."""
    return {"name": name, f"flops{8 * operand.element_size()}": cost.flops, "bytes": cost.bytes}
