"""PyramidKV (Cai et al. 2024): like SnapKV, with a budget that shrinks from layer to layer."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

PYRAMIDKV = TokenEviction(name="pyramidkv", presets={"pyramidkv": evicting(EvictionPolicy.PYRAMIDKV)})
