"""A Triton kernel's cost as launch metadata, with the keys that `triton.profiler` reads."""

from typing import Any

from torch import Tensor

from ridgeplan.roofline.cost import Cost


def launch_metadata(name: str, cost: Cost, operand: Tensor) -> dict[str, Any]:
    """Name, bytes, and flops under a key that names the operand's bits."""
    return {"name": name, f"flops{8 * operand.element_size()}": cost.flops, "bytes": cost.bytes}
