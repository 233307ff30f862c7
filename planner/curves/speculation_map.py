"""The speed-up of speculation over gamma and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance import Acceptance, AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.search.question import Question
from ridgeplan.planner.search_space import GAMMAS
from ridgeplan.roofline.evaluate import evaluate


@dataclass(frozen=True)
class SpeculationMap:
    """Speed-up over plain decoding, [acceptances, gammas], and the acceptance that is predicted for the plan."""

    acceptances: np.ndarray
    gammas: np.ndarray
    speedup: np.ndarray
    predicted: Acceptance

    @property
    def best_gammas(self) -> np.ndarray:
        """The fastest gamma at each acceptance, 0 where plain decoding is faster than all: [acceptances]."""
        best = self.gammas[self.speedup.argmax(axis=1)]
        return np.where(self.speedup.max(axis=1) > 1, best, 0)

    @property
    def optimum(self) -> tuple[int, float]:
        """The fastest gamma at the predicted acceptance, and its speed-up there, by linear interpolation."""
        at_predicted = [np.interp(self.predicted.best, self.acceptances, column) for column in self.speedup.T]
        best = int(np.argmax(at_predicted))
        return int(self.gammas[best]), float(at_predicted[best])


def speculation_map(plan: Plan, question: Question, acceptances: Sequence[float]) -> SpeculationMap:
    """A plan that drafts at every gamma and at each of `acceptances`, ascending, instead of the predicted one."""
    shape, machine = question.shape, question.machine
    gammas, rows = np.array(GAMMAS), np.asarray(acceptances)
    drafting = replace(strategy_of(plan, shape, machine, 1.0), gamma=gammas, acceptance=rows[:, None])
    plain = autoregressive(plan.workload)
    plain_s = evaluate(shape, machine, strategy_of(plain, shape, machine, 1.0), rates_of(plain, shape, machine)).tpot_s
    tpot_s = evaluate(shape, machine, drafting, rates_of(plan, shape, machine)).tpot_s
    predicted = AcceptanceModel.of_profile(shape, plan.workload.context, question.profile).of(plan)
    return SpeculationMap(rows, gammas, plain_s / tpot_s, predicted)
