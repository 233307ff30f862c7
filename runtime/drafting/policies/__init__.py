"""Draft policies: which tokens of the cache drafts read, one file each.

base.py says what a policy does; sparse.py, ranked.py, verified.py and per_query.py are what several share.
Not here: their hyperparameters (planner/axes), and what a policy costs and how often its drafts are accepted (planner).
"""

from collections.abc import Callable, Mapping
from typing import Any

from ridgeplan.runtime.drafting.policies.all import AllTokens
from ridgeplan.runtime.drafting.policies.base import DraftPolicy
from ridgeplan.runtime.drafting.policies.oracle import Oracle
from ridgeplan.runtime.drafting.policies.progressive import Progressive
from ridgeplan.runtime.drafting.policies.quest import Quest
from ridgeplan.runtime.drafting.policies.snapkv import SnapKV
from ridgeplan.runtime.drafting.policies.specattn import SpecAttn
from ridgeplan.runtime.drafting.policies.specextend import SpecExtend
from ridgeplan.runtime.drafting.policies.streamingllm import StreamingLLM
from ridgeplan.runtime.kv.cache import Cache

# By the plan's name for a draft selection. Each is made with the plan's selection and the cache.
POLICIES: Mapping[str, Callable[[Any, Cache], DraftPolicy]] = {
    "all": AllTokens,
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "quest": Quest,
    "specextend": SpecExtend,
    "specattn": SpecAttn,
    "progressive": Progressive,
    "oracle": Oracle,
}


def draft_policy(selection: Any, cache: Cache) -> DraftPolicy:
    """The policy of a plan's selection, for one cache."""
    return POLICIES[selection.name](selection, cache)


__all__ = ["POLICIES", "AllTokens", "DraftPolicy", "draft_policy"]
