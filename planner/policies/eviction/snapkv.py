"""SnapKV (Li et al. 2024): keeps the tokens that the prompt's last window attends to most, and the window."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import whole


@dataclass(frozen=True)
class SnapKVSettings(EvictionSettings):
    """window: the prompt's last tokens, which count towards the budget. pooling: tokens over which the largest score
    is taken, 1 for none. The defaults are the paper's for LongBench.
    """

    window: int = whole(1, 4096, default=32)
    pooling: int = whole(1, 255, default=7)

    @property
    def scored_queries(self) -> float:
        return self.window


SNAPKV = TokenEviction(
    name="snapkv",
    settings=SnapKVSettings,
    executable=True,
    chunked=True,
    ruler=69.94,
    presets={"snapkv": evicting(EvictionPolicy.SNAPKV)},
)
