"""The oracle: keeps what the tokens that really come next attend to. An upper bound, so it has no preset."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction
from ridgeplan.roofline.catalog.checks import whole


@dataclass(frozen=True)
class OracleSettings(EvictionSettings):
    """coming: how many of the coming tokens it asks, at most."""

    coming: int = whole(1, 65536, default=128)

    @property
    def scored_queries(self) -> float:
        return self.coming

    @property
    def appended_tokens(self) -> int:
        return self.coming


ORACLE = TokenEviction(name="oracle", settings=OracleSettings, executable=True)
