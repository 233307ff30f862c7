"""Curves of given plans over contexts, batches, gammas and acceptances, and where two curves cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from ridgeplan.planner.acceptance import Acceptance, AcceptanceModel
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.prediction import Prediction, predict_question
from ridgeplan.planner.question import Question
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search import GAMMAS
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.memory import MemoryBreakdown, offload_thresholds, resident_memory
from ridgeplan.roofline.plan.plan import Placement, Plan
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.policy import KV_BUDGET

TINY = 1e-12


@dataclass(frozen=True)
class Crossing:
    """A crossing of two curves: `before` is the lower one below `x`, `after` above it."""

    x: float
    y: float
    before: str
    after: str


def crossings(x: Sequence[float], curves: Mapping[str, np.ndarray]) -> list[Crossing]:
    """All crossings of named curves over common x, interpolated on log-log scales; NaN values are skipped."""
    points = [point for pair in combinations(curves.items(), 2) for point in _of_pair(np.log(x), *pair)]
    return sorted(points, key=lambda point: point.x)


def _of_pair(log_x: np.ndarray, curve: tuple[str, np.ndarray], other: tuple[str, np.ndarray]) -> list[Crossing]:
    (name, first), (other_name, second) = ((label, np.log(values)) for label, values in (curve, other))
    gap = first - second
    gap = np.where(gap == 0, TINY, gap)  # curves that touch at a sample still differ on both sides
    points = []
    for index in np.flatnonzero(gap[:-1] * gap[1:] < 0):
        share = gap[index] / (gap[index] - gap[index + 1])
        x, y = (np.exp(values[index] + share * np.diff(values)[index]) for values in (log_x, first))
        before, after = (name, other_name) if gap[index] < 0 else (other_name, name)
        points.append(Crossing(float(x), float(y), before, after))
    return points


SHORTEST = 1024
CERTAIN = 1.0  # memory does not depend on acceptance


def resized(plan: Plan, context: int, batch: int | None = None) -> Plan:
    """The plan at another context, and batch if given."""
    workload = replace(plan.workload, context=int(context), batch=int(batch or plan.workload.batch))
    return replace(plan, workload=workload)


def contexts_of(question: Question, count: int) -> list[int]:
    """Up to `count` contexts, evenly spaced on a log scale, up to the longest that the question's model may have."""
    workload = question.workload
    yarn = question.options.yarn or workload.yarn_factor > 1
    longest = max(longest_context(question.shape, workload.new_tokens, yarn=yarn), workload.context)
    contexts = np.round(np.geomspace(min(SHORTEST, longest), longest, count)).astype(int)
    return [int(context) for context in np.unique(contexts)]


def over_contexts(plan: Plan, question: Question, contexts: Sequence[int]) -> list[Prediction]:
    """Predictions of the plan at each context, with bands, on the question's model and machine."""
    plans = [resized(plan, context) for context in contexts]
    return predict_question(plans, question)


def memory_over_contexts(plan: Plan, question: Question, contexts: Sequence[int]) -> MemoryBreakdown:
    """Bytes by purpose with everything on the GPU, each [contexts]."""
    shape, machine = question.shape, question.machine
    strategies = [strategy_of(resized(plan, context), shape, machine, CERTAIN) for context in contexts]
    memory = resident_memory(shape, machine, stack(strategies, [1] * len(strategies)))
    like = np.zeros(len(contexts))
    return MemoryBreakdown(**{name: like + value for name, value in vars(memory).items()})


@dataclass(frozen=True)
class OffloadStep:
    """Contexts from `first` up to, but not including, `last`, at which `layers` layers must be on the host."""

    layers: int
    first: int
    last: int


def offload_staircase(plan: Plan, question: Question, budget: int = KV_BUDGET) -> list[OffloadStep]:
    """The number of offloaded layers by context (SpeContext, Algorithm 1); each keeps `budget` tokens on the GPU.

    Empty steps are left out. The last step ends where offloading every layer is no longer enough. A device that shares
    the host's memory has the first step only.
    """
    shape, workload = question.shape, plan.workload
    allowed = replace(plan, placement=Placement(True, plan.placement.budget or budget))
    strategy = strategy_of(allowed, shape, question.machine, CERTAIN)
    reserved = workload.new_tokens + plan.speculation.gamma + 1
    lengths = offload_thresholds(shape, question.machine, strategy, reserved)
    if question.profile.hardware.shares_host_memory:
        lengths = lengths[:1]
    steps = [OffloadStep(0, 0, lengths[0])]
    steps += [OffloadStep(layers, *ends) for layers, ends in enumerate(pairwise(lengths), start=1)]
    return [step for step in steps if step.last > step.first]


@dataclass(frozen=True)
class BatchCurve:
    """One plan over the batches that fit. Each figure is [batches]."""

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
    peak, tpot = (
        np.broadcast_to(figure, (len(rows), len(gammas))) for figure in (estimate.memory.peak, estimate.tpot_s)
    )
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
    """A plan that drafts at every gamma and at each of `acceptances`, ascending, instead of the predicted one.

    Raises PlanError where the question's engine does not run it.
    """
    question.require_engine_runs(plan)
    shape, machine = question.shape, question.machine
    gammas, rows = np.array(GAMMAS), np.asarray(acceptances)
    drafting = replace(strategy_of(plan, shape, machine, 1.0), gamma=gammas, acceptance=rows[:, None])
    plain = autoregressive(plan.workload)
    plain_s = evaluate(shape, machine, strategy_of(plain, shape, machine, 1.0), rates_of(plain, shape, machine)).tpot_s
    tpot_s = evaluate(shape, machine, drafting, rates_of(plan, shape, machine)).tpot_s
    predicted = AcceptanceModel.of_profile(shape, plan.workload.context, question.profile).of(plan)
    return SpeculationMap(rows, gammas, plain_s / tpot_s, predicted)
