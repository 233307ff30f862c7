"""Execution of policies: selectors of cached tokens for drafts or a sparse target, and scorers of evictions.

base.py has the selectors' interface and what several of them share, eviction_scorer.py that of scorers. All files of
this folder are imported and their classes register themselves by the names that plans use: a new policy is one file
here and one entry in roofline/plan/policies.
Not here: hyperparameters, budgets and costs (roofline/plan), how often drafts are accepted (planner/acceptance), and
when prefill calls a scorer (runtime/model).
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.policies.base import TokenSelector
from ridgeplan.runtime.policies.eviction_scorer import EvictionScorer
from ridgeplan.runtime.policies.registry import SCORERS, SELECTORS
from ridgeplan.runtime.retrieval.head import Head

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def token_selector(selection: Any, builder: AttentionMetadataBuilder, head: Head | None = None) -> TokenSelector:
    """The selector that executes a plan's selection on one cache.

    head: the model's retrieval head. Raises WorkloadError where the selection needs one and there is none.
    """
    kind: type[TokenSelector] = SELECTORS[selection.name]
    return kind(selection, builder, *((head,) if kind.uses_head else ()))


def scorer_for(plan: Plan) -> EvictionScorer | None:
    """The scorer that executes the plan's eviction, if it has one. Raises PlanError for unknown hyperparameters."""
    eviction = plan.eviction.method
    scorer: EvictionScorer | None = None if eviction is None else SCORERS[eviction.name](eviction)
    return scorer
