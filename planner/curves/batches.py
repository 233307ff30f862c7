"""A plan at other batches, each at its best gamma there: throughput of a GPU against speed for a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.search.question import Question
from ridgeplan.planner.search_space import GAMMAS
from ridgeplan.roofline.evaluate import evaluate


@dataclass(frozen=True)
class BatchCurve:
    """One plan over batches, without those that do not fit. Each figure is [batches]."""

    plan: Plan
    batches: np.ndarray
    gamma: np.ndarray
    tpot_ms: np.ndarray
    peak_bytes: np.ndarray

    @property
    def per_user(self) -> np.ndarray:
        """Tokens per second of one request."""
        return 1e3 / self.tpot_ms

    @property
    def per_gpu(self) -> np.ndarray:
        """Tokens per second of the whole batch."""
        return self.batches * self.per_user


def over_batches(plan: Plan, question: Question, batches: Sequence[int]) -> BatchCurve:
    """The plan at each of `batches` that fits, at the fastest of the gammas that fit there."""
    shape, machine = question.shape, question.machine
    gammas, rows = np.array(GAMMAS if plan.speculation.active else (0,)), np.asarray(batches)
    model = AcceptanceModel.of_profile(shape, plan.workload.context, question.profile)
    acceptance = model.best(plan, gammas, np.full(len(gammas), plan.speculation.ratio))
    strategy = strategy_of(plan, shape, machine, 1.0)
    varied = replace(strategy, batch=rows[:, None], gamma=gammas, acceptance=acceptance)
    estimate = evaluate(shape, machine, varied, rates_of(plan, shape, machine))
    peak, tpot = (np.broadcast_to(one, (len(rows), len(gammas))) for one in (estimate.memory.peak, estimate.tpot_s))
    ranked = np.where(peak <= question.memory_limit_bytes, tpot, np.inf)
    place = np.flatnonzero(np.isfinite(ranked).any(axis=1)), ranked.argmin(axis=1)
    chosen = place[0], place[1][place[0]]
    return BatchCurve(plan, rows[chosen[0]], gammas[chosen[1]], 1e3 * tpot[chosen], peak[chosen])


def frontier(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the points that no other exceeds in one figure and equals in the other, by ascending x."""
    order = np.lexsort((-y, -x))
    best = np.maximum.accumulate(y[order])
    first = np.append(True, best[1:] > best[:-1]) if len(order) else np.zeros(0, dtype=bool)
    return order[first][::-1]
