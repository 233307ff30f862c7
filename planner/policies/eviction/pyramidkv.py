"""PyramidKV (Cai et al. 2024): like SnapKV, with a budget that shrinks from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.eviction.snapkv import SnapKVSettings
from ridgeplan.planner.policies.policy import TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import number


@dataclass(frozen=True)
class PyramidKVSettings(SnapKVSettings):
    """steepness: the last layer keeps the window and 1/steepness of the average rest (the paper's beta, of 20)."""

    steepness: float = number(1, 1000, default=20.0)

    def budgets(self, budget: int, layers: int) -> tuple[int, ...]:
        """An arithmetic sequence from the first layer to the last (section 4.2), `budget` on average."""
        rest = max(budget - self.window, 0)
        step = 2 * (rest - rest / self.steepness) / max(layers - 1, 1)
        middle = (layers - 1) / 2
        return tuple(max(1, round(budget + step * (middle - layer))) for layer in range(layers))


PYRAMIDKV = TokenEviction(
    name="pyramidkv",
    settings=PyramidKVSettings,
    executable=True,
    chunked=True,
    ruler=68.67,
    presets={"pyramidkv": evicting(EvictionPolicy.PYRAMIDKV)},
)
