"""The plans of the search space that the runtime executes, the profile prices and a question allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.pricing import unpriced
from ridgeplan.planner.presets import describe
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search.question import Question
from ridgeplan.planner.search_space import Family, families
from ridgeplan.planner.support import allows_chunks, exceeds_window
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS, QUANTIZATION_GROUPS


def runnable_families(question: Question, *, regroup: bool = False) -> list[Family]:
    """Families that run and are allowed; with `regroup` each with every size of quantization groups, and evictions also
    with prompts that go through in chunks.

    Larger groups have fewer scales, smaller ones a smaller buffer in full precision; chunks have a smaller workspace.
    They are only searched where the usual ones do not fit. Layers may be on the host if the question allows it.
    """
    known = families(question.workload, offload=question.offload, quality=question.quality)
    running = [family for family in known if runs(family.template, question)]
    return [one for family in running for one in regrouped(family)] if regroup else running


def smallest_plans(searched: Sequence[Family]) -> list[Plan]:
    """The plan of each family that takes the least memory: that with the fewest drafts."""
    return [family.plan(min(family.gammas), family.ratios[0]) for family in searched]


def context_limits(plans: Sequence[Plan], question: Question) -> np.ndarray:
    """The longest context that each plan may have for the question's model, new tokens and use of YaRN: [plans].

    Beyond a sliding window only plain decoding runs.
    """
    workload, shape = question.workload, question.shape
    longest = longest_context(shape, workload.new_tokens, yarn=workload.yarn_factor > 1)
    within_window = max((shape.window_tokens or longest) - workload.new_tokens, 0)
    long = replace(workload, context=longest)
    bounded = [exceeds_window(replace(plan, workload=long), shape) for plan in plans]
    return np.where(bounded, min(within_window, longest), longest)


def runs(plan: Plan, question: Question) -> bool:
    """Whether the question's backend executes the plan, its profile prices it and it is wanted at all."""
    return not question.unwanted(plan) and not question.unsupported(plan) and unpriced(plan, question.shape) is None


def regrouped(family: Family) -> Iterator[Family]:
    """The family with every size of quantization groups, and also in chunks where its eviction allows them."""
    yield from _with_groups(family)
    if allows_chunks(family.template):
        evicting = replace(family.template.eviction, chunk=PREFILL_CHUNK_TOKENS)
        template = replace(family.template, eviction=evicting)
        yield from _with_groups(replace(family, name=describe(template), template=template))


def _with_groups(family: Family) -> Iterator[Family]:
    template = family.template
    quantized = template.weights.target_bits != 16 or template.weights.draft_differs
    weights = replace(template.weights, group=max(QUANTIZATION_GROUPS)) if quantized else template.weights
    for group in QUANTIZATION_GROUPS if template.kv.format.quantized else (template.kv.group,):
        yield replace(family, template=replace(template, weights=weights, kv=replace(template.kv, group=group)))
