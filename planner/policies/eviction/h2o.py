"""H2O (Zhang et al. 2023): keeps the tokens with the largest accumulated attention."""

from ridgeplan.planner.plan import EvictionPolicy
from ridgeplan.planner.policies.policy import TokenEviction, evicting

H2O = TokenEviction(name="h2o", presets={"h2o": evicting(EvictionPolicy.H2O)})
