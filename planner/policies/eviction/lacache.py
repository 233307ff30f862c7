"""LaCache (Shi et al. 2025): keeps a ladder of spans, shifted from layer to layer."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

LACACHE = TokenEviction(name="lacache", presets={"lacache": evicting(EvictionPolicy.LACACHE)})
