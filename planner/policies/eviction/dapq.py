"""DapQ: keeps the tokens that pseudo queries at the positions of future tokens attend to most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeplan.planner.plan import EvictionPolicy, Plan, Workload
from ridgeplan.planner.policies.policy import EvictionSettings, TokenEviction, evicting
from ridgeplan.planner.policies.selection.quantspec import quantspec
from ridgeplan.roofline.catalog.checks import whole

dapq = evicting(EvictionPolicy.DAPQ)


def dapq_quantspec(workload: Workload) -> Plan:
    """DapQ evicts after prefill, and QuantSpec decodes the rest; not published."""
    return replace(quantspec(workload), eviction=dapq(workload).eviction)


@dataclass(frozen=True)
class DapQSettings(EvictionSettings):
    """Pseudo tokens: the prompt's first `prefix` and last `suffix` tokens (section 5.1; Table 10 also has 8 + 24).

    recent: latest tokens that always stay; Eq 5 protects none. pooling: tokens over which the largest score is taken;
    1 is off, as Eq 4 says nothing of it (docs/papers.md).
    """

    prefix: int = whole(0, 1024, default=4)
    suffix: int = whole(1, 1024, default=28)
    recent: int = whole(0, 4096, default=0)
    pooling: int = whole(1, 255, default=1)

    @property
    def scored_queries(self) -> float:
        return self.appended_tokens

    @property
    def appended_tokens(self) -> int:
        return self.prefix + self.suffix


DAPQ = TokenEviction(
    name="dapq",
    settings=DapQSettings,
    executable=True,
    chunked=True,
    ruler=77.56,
    presets={"dapq": dapq, "dapq-quantspec": dapq_quantspec},
)
