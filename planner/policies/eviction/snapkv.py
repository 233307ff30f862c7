"""SnapKV (Li et al. 2024): keeps the tokens that the prompt's last window attends to most."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

SNAPKV = TokenEviction(name="snapkv", presets={"snapkv": evicting(EvictionPolicy.SNAPKV)})
