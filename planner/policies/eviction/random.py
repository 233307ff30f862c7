"""Random eviction: a lower bound for policies that choose. No preset, so that nothing recommends it."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction
from ridgeplan.roofline.catalog.checks import whole


@dataclass(frozen=True)
class RandomSettings(EvictionSettings):
    """seed: of the choice, which differs by layer and KV head."""

    seed: int = whole(0, 2**31 - 1, default=0)


RANDOM = TokenEviction(name="random", settings=RandomSettings, executable=True)
