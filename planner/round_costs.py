"""Rounds of a plan at each gamma: their seconds, and the acceptance that is predicted for their drafts.

What adaptive gamma (runtime/drafting/gamma_controller.py) and tuning (validate/tuning) choose by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.speculation import RoundCosts


def round_costs(plan: Plan, shape: ModelShape, profile: Profile, gammas: Sequence[int] = ()) -> RoundCosts:
    """Costs at the plan's gammas, or at those given, and at 0; averaged over the generation of the plan's workload."""
    wanted = sorted({0, *(gammas or plan.speculation.gammas)})
    found = estimate_gammas(plan, shape, profile, Machine.of(profile), wanted)
    acceptance = AcceptanceModel.of_profile(shape, plan.workload.context, profile).of(plan).best
    return RoundCosts(dict(zip(wanted, map(float, found.round.total_s), strict=True)), acceptance)


def estimate_gammas(
    plan: Plan, shape: ModelShape, profile: Profile, machine: Machine, gammas: Sequence[int]
) -> Estimate:
    """The plan at every gamma of `gammas`, each at the acceptance that is predicted for it."""
    model = AcceptanceModel.of_profile(shape, plan.workload.context, profile)
    gamma = np.asarray(gammas)
    acceptance = model.best(plan, gamma, np.full(len(gamma), plan.speculation.ratio))
    strategy = replace(strategy_of(plan, shape, machine, 1.0), gamma=gamma, acceptance=acceptance)
    return evaluate(shape, machine, strategy, rates_of(plan, shape, machine))


def settled_gamma(plan: Plan, shape: ModelShape, profile: Profile, machine: Machine) -> int:
    """The gamma that an adaptive plan settles at where drafts are accepted as predicted; a fixed plan's own."""
    gammas = plan.speculation.gammas
    if len(gammas) == 1:
        return plan.speculation.gamma
    return gammas[int(np.argmin(estimate_gammas(plan, shape, profile, machine, gammas).tpot_s))]
