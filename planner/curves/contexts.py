"""A plan at other contexts: its predictions, its memory, and the layers that would have to leave the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ridgeplan.planner.lowering import stack, strategy_of
from ridgeplan.planner.plan import Placement, Plan
from ridgeplan.planner.policies.policy import KV_BUDGET
from ridgeplan.planner.prediction import Prediction, predict_all
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search.question import Question
from ridgeplan.roofline.memory import MemoryBreakdown
from ridgeplan.roofline.placement import offload_thresholds, resident_memory

SHORTEST = 1024
CERTAIN = 1.0  # memory does not depend on acceptance


def resized(plan: Plan, context: int, batch: int | None = None) -> Plan:
    """The plan at another context, and batch if given."""
    workload = replace(plan.workload, context=int(context), batch=int(batch or plan.workload.batch))
    return replace(plan, workload=workload)


def contexts_of(question: Question, count: int) -> list[int]:
    """Up to `count` contexts, evenly spaced on a log scale, up to the longest that the question's model may have."""
    workload = question.workload
    reached = longest_context(question.shape, workload.new_tokens, yarn=question.yarn or workload.yarn_factor > 1)
    longest = max(reached, workload.context)
    found: list[int] = np.unique(np.round(np.geomspace(min(SHORTEST, longest), longest, count)).astype(int)).tolist()
    return found


def over_contexts(plan: Plan, question: Question, contexts: Sequence[int]) -> list[Prediction]:
    """Predictions of the plan at each context, with bands, on the question's model and machine."""
    plans = [resized(plan, context) for context in contexts]
    return predict_all(plans, question.shape, question.profile, question.machine)


def memory_over_contexts(plan: Plan, question: Question, contexts: Sequence[int]) -> MemoryBreakdown:
    """Bytes by purpose with everything on the GPU, each [contexts]."""
    shape, machine = question.shape, question.machine
    strategies = [strategy_of(resized(plan, context), shape, machine, CERTAIN) for context in contexts]
    found = resident_memory(shape, machine, stack(strategies, [1] * len(strategies)))
    like = np.zeros(len(contexts))
    return MemoryBreakdown(**{name: like + value for name, value in vars(found).items()})


@dataclass(frozen=True)
class OffloadStep:
    """Contexts from `first` up to, but not including, `last`, at which `layers` layers must be on the host."""

    layers: int
    first: int
    last: int


def offload_staircase(plan: Plan, question: Question, budget: int = KV_BUDGET) -> list[OffloadStep]:
    """How many layers' KV must leave the GPU at which context (SpeContext, Algorithm 1), where each keeps `budget`.

    Steps of no length are left out; the last ends where not even offloading every layer is enough.
    """
    shape, workload = question.shape, plan.workload
    allowed = replace(plan, placement=Placement(True, plan.placement.budget or budget))
    strategy = strategy_of(allowed, shape, question.machine, CERTAIN)
    reserved = workload.new_tokens + plan.speculation.gamma + 1
    lengths = offload_thresholds(shape, question.machine, strategy, reserved)
    steps = [OffloadStep(0, 0, lengths[0])]
    steps += [OffloadStep(layers, *ends) for layers, ends in enumerate(pairwise(lengths), start=1)]
    return [step for step in steps if step.last > step.first]
