"""Eviction during prefill: which prompt tokens stay in the cache, by the names that plans use.

All files of this folder are imported and their scorers register themselves: a new policy is one file here and one entry
in roofline/plan/policies.
Not here: budgets and hyperparameters (roofline/plan/policies), and when prefill asks a scorer (runtime/model).
"""

from importlib import import_module
from pkgutil import iter_modules

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime.eviction.base import SCORERS, EvictionScorer

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def eviction_scorer(plan: Plan) -> EvictionScorer | None:
    """The scorer that executes the plan's eviction, if it has one. Raises PlanError for unknown hyperparameters."""
    eviction = plan.eviction.method
    return None if eviction is None else SCORERS[eviction.name](eviction)


def most_appended(plan: Plan) -> int:
    """Most tokens that the plan's eviction appends to a prompt; 0 without one."""
    eviction = plan.eviction.method
    return 0 if eviction is None else eviction.appended_tokens


__all__ = ["SCORERS", "EvictionScorer", "eviction_scorer", "most_appended"]
