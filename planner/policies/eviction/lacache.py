"""LaCache (Shi et al. 2025): a ladder of spans, shifted from layer to layer, stays."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

LACACHE = TokenEviction(name="lacache", presets={"lacache": evicting(EvictionPolicy.LACACHE)})
