"""Draft policies: which tokens of the cache drafts read, one file each.

Not here: what a policy costs and how often its drafts are accepted (planner).
"""

from collections.abc import Callable, Mapping

from ridgeplan.runtime.drafting.policies.all import AllTokens
from ridgeplan.runtime.drafting.policies.base import DraftPolicy

# By the plan's name for a draft selection. Each is made with the plan's ratio, the share of cached tokens it may read.
POLICIES: Mapping[str, Callable[[float], DraftPolicy]] = {"all": AllTokens}

__all__ = ["POLICIES", "AllTokens", "DraftPolicy"]
