"""The best plan of every family, from one vectorized evaluation of all their grids."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.pricing import unpriced
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.presets import PRESETS
from ridgeplan.planner.presets import preset as preset_of
from ridgeplan.planner.search.question import Objective, Question
from ridgeplan.planner.search_space import Family, families, family_of
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.placement import resident_memory


@dataclass(frozen=True)
class Candidate:
    """The best plan of a family: its objective (lower is better), its peak memory, and what it takes of the host."""

    name: str
    plan: Plan
    score: float
    tpot_s: float
    peak_bytes: float
    host_bytes: float

    def rejection(self, question: Question) -> str | None:
        """Why this plan cannot be recommended, however fast; None if it can."""
        return self.exclusion(question) or self.unsupported(question)

    def exclusion(self, question: Question) -> str | None:
        """Why this plan is no answer, on whatever runtime; None if it is one."""
        return question.misfit(self.peak_bytes, self.host_bytes) or question.unwanted(self.plan)

    def unsupported(self, question: Question) -> str | None:
        """What the backend lacks to execute this plan, or the profile to price it; None if nothing."""
        return question.unsupported(self.plan)


def search(question: Question, searched: tuple[Family, ...] | None = None) -> list[Candidate]:
    """The best plan of every family of the search space, or of those given."""
    if searched is None:
        offload = question.offload and not fits_whole(question)
        known = families(question.workload, offload=offload, quality=question.quality)
        searched = tuple(family for family in known if unpriced(family.template, question.shape) is None)
    model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
    machine = question.machine
    templates = [strategy_of(family.template, question.shape, machine, 1.0) for family in searched]
    rates = [rates_of(family.template, question.shape, machine) for family in searched]
    grids = [family.grid() for family in searched]
    gamma, ratio = (np.concatenate(axis) for axis in zip(*grids, strict=True))
    acceptance = np.concatenate(model.best_of_all([family.template for family in searched], grids))
    sizes = [family.size for family in searched]
    strategy = replace(stack(templates, sizes), gamma=gamma, draft_ratio=ratio, acceptance=acceptance)
    estimate = evaluate(question.shape, machine, strategy, stack(rates, sizes))
    return list(_best_of_each(searched, (gamma, ratio), estimate, question))


def best_of_preset(name: str, question: Question) -> Candidate:
    """The named preset at its fastest gamma and ratio that fit, as `recommend` lists it. Raises PlanError."""
    (found,) = search(question, (family_of(name, preset_of(name, question.workload)),))
    return found


def fits_whole(question: Question) -> bool:
    """Whether plain decoding fits without offloading."""
    machine = question.machine
    plain = strategy_of(autoregressive(question.workload), question.shape, machine, 1.0)
    return bool(resident_memory(question.shape, machine, plain).peak <= question.memory_limit_bytes)


def _best_of_each(
    searched: tuple[Family, ...], grid: tuple[np.ndarray, ...], estimate: Estimate, question: Question
) -> Iterator[Candidate]:
    """For each family, the fitting plan with the lowest objective; if none fits, the one that needs least memory.

    Plans of the joint space that may offload but need not are skipped, as they are listed without offloading too.
    """
    size = len(grid[0])
    offloaded = np.broadcast_to(estimate.offloaded_layers, (size,))
    figures = estimate.tpot_s, estimate.memory.peak, estimate.host_bytes
    tpot, peak, host = (np.broadcast_to(array, (size,)) for array in figures)
    score = _score(estimate, question, size)
    fits = question.fitting(peak, host)
    start = 0
    for family in searched:
        part = slice(start, start + family.size)
        start += family.size
        ranked = np.where(fits[part], score[part], math.inf) if fits[part].any() else peak[part]
        best = part.start + int(np.argmin(ranked))
        if family.template.placement.offload and family.name not in PRESETS and not offloaded[best]:
            continue
        plan = within_limit(family.plan(*(axis[best] for axis in grid)), question.memory_limit_bytes)
        yield Candidate(family.name, plan, *(float(figure[best]) for figure in (score, tpot, peak, host)))


def within_limit(plan: Plan, limit_bytes: float) -> Plan:
    """The plan with a limit of memory, at which layers leave, if any may."""
    if not plan.placement.offload:
        return plan
    return replace(plan, placement=replace(plan.placement, memory_bytes=int(limit_bytes)))


def _score(estimate: Estimate, question: Question, size: int) -> np.ndarray:
    value = {
        Objective.LATENCY: estimate.tpot_s,
        Objective.TOTAL: estimate.ttft_s + question.workload.new_tokens * estimate.tpot_s,
        Objective.MEMORY: estimate.memory.peak,
    }[question.objective]
    return np.broadcast_to(np.asarray(value, dtype=float), (size,))
