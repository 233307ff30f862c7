"""DapQ: keeps the tokens that pseudo queries at the positions of future tokens attend to most."""

from __future__ import annotations

from dataclasses import replace

from ridgeplan.planner.plan import EvictionPolicy, Plan, Workload
from ridgeplan.planner.policies.policy import TokenEviction, evicting
from ridgeplan.planner.policies.selection.quantspec import quantspec

dapq = evicting(EvictionPolicy.DAPQ)


def dapq_quantspec(workload: Workload) -> Plan:
    """DapQ evicts after prefill, and QuantSpec decodes the rest; not published."""
    return replace(quantspec(workload), eviction=dapq(workload).eviction)


DAPQ = TokenEviction(name="dapq", presets={"dapq": dapq, "dapq-quantspec": dapq_quantspec})
