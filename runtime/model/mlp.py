"""The MLP of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ridgeplan.runtime.model.linear import Linear


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """down(silu(gate(x)) * up(x)) of x [..., hidden]. gate_up: gate and up projections, stacked in this order."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x, gated=True))

    def with_projections(self, change: Callable[[Linear], Linear]) -> GatedMLP:
        """The same MLP with `change` applied to each projection."""
        return GatedMLP(change(self.gate_up), change(self.down))
