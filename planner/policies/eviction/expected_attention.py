"""Expected Attention (Devoto et al. 2025): keeps what queries of the prompt's distribution would attend to later."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.roofline.catalog.checks import whole


@dataclass(frozen=True)
class ExpectedAttentionSettings(EvictionSettings):
    """future: coming positions that the rotation is averaged over. sinks: first tokens, which always stay and whose
    queries do not count. The defaults are those of the authors' library.
    """

    future: int = whole(1, 65536, default=512)
    sinks: int = whole(0, 4096, default=4)

    @property
    def scored_queries(self) -> float:
        """Two products with a head's covariance: at 128 channels as much work as the scores of 256 queries."""
        return 256


EXPECTED_ATTENTION = TokenEviction(
    name="expected-attention",
    settings=ExpectedAttentionSettings,
    executable=True,
    chunked=True,
    presets={"expected-attention": evicting(EvictionPolicy.EXPECTED_ATTENTION)},
)
