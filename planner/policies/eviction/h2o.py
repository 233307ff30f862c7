"""H2O (Zhang et al. 2023): keeps the tokens with the largest accumulated attention, and the latest."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import number
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS


@dataclass(frozen=True)
class H2OSettings(EvictionSettings):
    """recent_share: the part of the budget that the latest tokens have (section 5: half)."""

    recent_share: float = number(0, 1, default=0.5)

    @property
    def scored_queries(self) -> float:
        return UNLIMITED_TOKENS


H2O = TokenEviction(
    name="h2o",
    settings=H2OSettings,
    executable=True,
    ruler=52.54,
    presets={"h2o": evicting(EvictionPolicy.H2O)},
)
