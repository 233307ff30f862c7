"""Plans over a grid of contexts and batches, each at its best gamma there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.curves.contexts import resized
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.plan import Plan
from ridgeplan.planner.search.question import Question
from ridgeplan.planner.search_space import GAMMAS
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.strategy import Strategy


@dataclass(frozen=True)
class Grid:
    """Plans at contexts and batches. Each figure is [plans, contexts, batches]; gamma is the plan's fastest that fits."""

    plans: tuple[Plan, ...]
    contexts: np.ndarray
    batches: np.ndarray
    tpot_ms: np.ndarray
    ttft_ms: np.ndarray
    peak_bytes: np.ndarray
    gamma: np.ndarray
    limit_bytes: float

    @property
    def fits(self) -> np.ndarray:
        """Where each plan fits: [plans, contexts, batches]."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Of the whole batch: [plans, contexts, batches]."""
        return 1e3 * self.batches / self.tpot_ms

    @property
    def fastest(self) -> np.ndarray:
        """Index of the fastest plan that fits, -1 where none does: [contexts, batches]."""
        times = np.where(self.fits, self.tpot_ms, np.inf)
        return np.where(self.fits.any(axis=0), times.argmin(axis=0), -1)

    def of_fastest(self, figure: np.ndarray) -> np.ndarray:
        """The figure of the fastest plan, NaN where none fits: [contexts, batches]."""
        chosen = np.take_along_axis(figure, np.maximum(self.fastest, 0)[None], axis=0)[0]
        return np.where(self.fastest < 0, np.nan, chosen)

    def dollars_per_million(self, dollars_per_hour: float) -> np.ndarray:
        """Price of a million output tokens at a GPU's hourly price: [plans, contexts, batches]."""
        return dollars_per_hour / 3600 / self.tokens_per_s * 1e6


def grid(plans: Sequence[Plan], question: Question, contexts: Sequence[int], batches: Sequence[int]) -> Grid:
    """Every plan at every context and batch, on the question's model and machine."""
    sizes = np.asarray(contexts), np.asarray(batches)
    found = [_figures(plan, question, *sizes) for plan in plans]
    return Grid(tuple(plans), *sizes, *map(np.stack, zip(*found, strict=True)), question.memory_limit_bytes)


def _figures(plan: Plan, question: Question, contexts: np.ndarray, batches: np.ndarray) -> tuple[np.ndarray, ...]:
    """Time per token, time to the first token, peak and gamma of one plan, each [contexts, batches]."""
    shape, machine = question.shape, question.machine
    gammas = np.array(GAMMAS if plan.speculation.active else (0,))
    size = (len(contexts), len(batches), len(gammas))
    strategy = _at_contexts([strategy_of(resized(plan, one), shape, machine, 1.0) for one in contexts])
    acceptance = np.stack([_acceptance(resized(plan, one), question, gammas) for one in contexts])
    varied = replace(strategy, batch=batches[None, :, None], gamma=gammas, acceptance=acceptance[:, None, :])
    estimate = evaluate(shape, machine, varied, rates_of(plan, shape, machine))
    figures = [
        np.broadcast_to(np.asarray(value, dtype=float), size)
        for value in (1e3 * estimate.tpot_s, 1e3 * estimate.ttft_s, estimate.memory.peak, gammas)
    ]
    tpot, peak = figures[0], figures[2]
    ranked = np.where(peak <= question.memory_limit_bytes, tpot, np.inf)
    best = np.where(np.isfinite(ranked).any(axis=-1), ranked.argmin(axis=-1), 0)[..., None]
    return tuple(np.take_along_axis(figure, best, axis=-1)[..., 0] for figure in figures)


def _at_contexts(strategies: Sequence[Strategy]) -> Strategy:
    """One strategy whose fields are numbers, or arrays [contexts, 1, 1]."""
    stacked = stack(strategies, [1] * len(strategies))
    return replace(stacked, **{one.name: _column(getattr(stacked, one.name)) for one in fields(stacked)})


def _column(value: Any) -> Any:
    return value[:, None, None] if isinstance(value, np.ndarray) else value


def _acceptance(plan: Plan, question: Question, gammas: np.ndarray) -> np.ndarray:
    """Conditional acceptance of the plan's drafts at each gamma: [gammas]."""
    model = AcceptanceModel.of_profile(question.shape, plan.workload.context, question.profile)
    return model.best(plan, gammas, np.full(len(gammas), plan.speculation.ratio))
