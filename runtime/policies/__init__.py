"""Draft and target policies: which cached tokens a step reads, by the name that plans use.

base.py says what a policy does; sparse.py, ranked.py and verified.py are what several share. Those that score by the
query itself are in per_query.
Not here: their hyperparameters (planner/axes), and what a policy costs and how often its drafts are accepted (planner).
"""

from collections.abc import Callable, Mapping
from typing import Any

from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.policies.base import AllTokens, DraftPolicy, StreamingLLM
from ridgeplan.runtime.policies.clusterkv import ClusterKV
from ridgeplan.runtime.policies.per_query import Oracle, Progressive, Quest, ShadowKV
from ridgeplan.runtime.policies.ranked import SnapKV, SpecAttn, SpecExtend
from ridgeplan.runtime.policies.retrieval_head import RetrievalHead
from ridgeplan.runtime.retrieval.head import Head

# By the plan's name for a selection. Each is made with the plan's selection and the cache.
POLICIES: Mapping[str, Callable[..., DraftPolicy]] = {
    "all": AllTokens,
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "quest": Quest,
    "specextend": SpecExtend,
    "specattn": SpecAttn,
    "progressive": Progressive,
    "oracle": Oracle,
    "retrieval-head": RetrievalHead,
    "clusterkv": ClusterKV,
    "shadowkv": ShadowKV,
}


def draft_policy(selection: Any, cache: Cache, head: Head | None = None) -> DraftPolicy:
    """The policy of a plan's selection, for one cache. head: the model's retrieval head, for the policy of that name.

    Raises WorkloadError where that is missing.
    """
    make = POLICIES[selection.name]
    return make(selection, cache, head) if make is RetrievalHead else make(selection, cache)


__all__ = ["POLICIES", "AllTokens", "DraftPolicy", "draft_policy"]
