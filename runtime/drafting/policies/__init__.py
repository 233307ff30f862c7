"""Draft policies: which tokens of the cache drafts read, one file each.

Not here: what a policy costs and how often its drafts are accepted (planner).
"""

from collections.abc import Callable, Mapping

from ridgeplan.runtime.drafting.policies.all import AllTokens
from ridgeplan.runtime.drafting.policies.base import DraftPolicy

# By the plan's name for a draft selection.
POLICIES: Mapping[str, Callable[[], DraftPolicy]] = {"all": AllTokens}

__all__ = ["POLICIES", "AllTokens", "DraftPolicy"]
