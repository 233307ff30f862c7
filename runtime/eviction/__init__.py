"""Eviction policies: which prompt tokens stay in the cache, by the name that plans use.

Not here: budgets and hyperparameters (planner/policies/eviction), and how prefill asks a policy (runtime/model).
"""

from collections.abc import Callable, Mapping
from typing import Any

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime.eviction.base import EvictionPolicy
from ridgeplan.runtime.eviction.expected_attention import ExpectedAttention
from ridgeplan.runtime.eviction.policies import H2O, DapQ, LaCache, Oracle, PyramidKV, Random, SnapKV, StreamingLLM

# By the plan's name for a policy. Each is made with the plan's hyperparameters, of the planner's class for it.
EVICTION_POLICIES: Mapping[str, Callable[[Any], EvictionPolicy]] = {
    "dapq": DapQ,
    "snapkv": SnapKV,
    "h2o": H2O,
    "pyramidkv": PyramidKV,
    "streamingllm": StreamingLLM,
    "lacache": LaCache,
    "expected-attention": ExpectedAttention,
    "random": Random,
    "oracle": Oracle,
}


def eviction_policy(plan: Plan) -> EvictionPolicy | None:
    """The policy that executes the plan's eviction, if it has one. Raises PlanError for unknown hyperparameters."""
    eviction = plan.eviction.method
    return None if eviction is None else EVICTION_POLICIES[eviction.name](eviction)


def most_appended(plan: Plan) -> int:
    """Most tokens that the plan's eviction appends to a prompt; 0 without one."""
    eviction = plan.eviction.method
    return 0 if eviction is None else eviction.appended_tokens


__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "Oracle", "eviction_policy", "most_appended"]
