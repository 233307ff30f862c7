"""LaCache (Shi et al. 2025): keeps a ladder of spans, shifted from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import number, whole


@dataclass(frozen=True)
class LaCacheSettings(EvictionSettings):
    """sinks: first tokens that always stay. recent_share: the latest tokens' part of the budget. ladders: how many
    times the ladder of spans repeats between them.
    """

    sinks: int = whole(0, 4096, default=4)
    recent_share: float = number(0, 1, default=0.5)
    ladders: int = whole(1, 4096, default=4)


LACACHE = TokenEviction(
    name="lacache",
    settings=LaCacheSettings,
    executable=True,
    chunked=True,
    ruler=14.89,
    presets={"lacache": evicting(EvictionPolicy.LACACHE)},
)
