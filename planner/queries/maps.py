"""Maps of the fastest plan over many contexts and batches at once.

All sizes are evaluated at once. A large search space is first narrowed to plans that are near the fastest at a few
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.feasibility import executable_families, regrouped
from ridgeplan.planner.lowering import rates_of, reshaped, stack, strategy_of
from ridgeplan.planner.parallelism import divided
from ridgeplan.planner.question import Question
from ridgeplan.planner.recommend import preference, unmeasured_spread
from ridgeplan.planner.search import Family, families, family_of, named_plan, within_limit
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.plan.plan import Plan, Workload, require
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.support import exceeds_window

MAX_SIZES = 65_536  # of a grid
DIRECT = 1_000_000  # plans x sizes that are evaluated without narrowing
COARSE = 4  # sizes along either axis at which plans are narrowed
NEAR_FASTEST = 1.05  # times the fastest there


@dataclass(frozen=True)
class PlanMap:
    """The fastest plans of a grid, beside plain decoding. Arrays are [contexts, batches]; seconds and bytes.

    workloads: one per context. index: the plan's place in `families`. fits: whether any plan does; where none does, the
    figures are those of the plan that needs the least memory.
    """

    workloads: tuple[Workload, ...]
    batches: tuple[int, ...]
    memory_limit_bytes: float
    families: tuple[Family, ...]
    index: np.ndarray
    gamma: np.ndarray
    ratio: np.ndarray
    tpot_s: np.ndarray
    ttft_s: np.ndarray
    request_ttft_s: np.ndarray
    peak_bytes: np.ndarray
    host_bytes: np.ndarray
    fits: np.ndarray
    plain_tpot_s: np.ndarray
    plain_fits: np.ndarray

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of a prompt, by row."""
        return tuple(workload.context for workload in self.workloads)

    @property
    def names(self) -> np.ndarray:
        """The plans' names, as in `recommend`."""
        return np.array([family.name for family in self.families], dtype=object)[self.index]

    @property
    def speedup(self) -> np.ndarray:
        """Over plain decoding, whether that fits or not."""
        return np.asarray(self.plain_tpot_s / self.tpot_s)

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Of the whole batch."""
        return np.asarray(np.asarray(self.batches) / self.tpot_s)

    @property
    def served_tokens_per_s(self) -> np.ndarray:
        """Of a batch that is served at a time: its prompts one after another, then all its tokens."""
        new_tokens = self.workloads[0].new_tokens
        return np.asarray(np.asarray(self.batches) * new_tokens / (self.ttft_s + new_tokens * self.tpot_s))

    def gpus(self, row: int, column: int) -> int:
        """GPUs of the plan of the context and the batch with these indices."""
        return self.families[self.index[row, column]].template.workload.parallel.gpus

    def plan(self, row: int, column: int) -> Plan:
        """The plan of the context and the batch with these indices."""
        family = self.families[self.index[row, column]]
        parallel = family.template.workload.parallel
        workload = replace(self.workloads[row], batch=self.batches[column], parallel=parallel)
        resized = replace(family, template=at_workload(family.template, workload))
        plan = resized.plan(int(self.gamma[row, column]), float(self.ratio[row, column]))
        return within_limit(plan, self.memory_limit_bytes)


def plan_map(question: Question, contexts: Sequence[int], batches: Sequence[int], preset: str | None = None) -> PlanMap:
    """`degree_map` over all degrees of parallelism that the question allows."""
    questions, _ = divided(question)
    maps = (degree_map(sharded, contexts, batches, preset) for sharded in questions.values())
    place, everywhere = np.ix_(range(len(contexts)), range(len(batches))), np.ones((len(contexts), len(batches)), bool)
    return reduce(lambda first, second: _merged(first, second, place, everywhere), maps)


def degree_map(
    question: Question, contexts: Sequence[int], batches: Sequence[int], preset: str | None = None
) -> PlanMap:
    """The fastest plan that runs, at every size; of a preset, its fastest gamma and ratio, whether it runs or not.

    `question` says which model, machine, quality and memory; its own context and batch are not used. Where no plan
    fits, or the fastest leaves layers on the host, all sizes of quantization groups are tried, as by `recommend`.
    Raises PlanError for sizes out of range.
    """
    sizes = len(contexts) * len(batches)
    require(0 < sizes <= MAX_SIZES, f"{len(contexts)} contexts x {len(batches)} batches; allowed: 1 to {MAX_SIZES}")
    executed = question.as_executed
    executed.resized(min(contexts), min(batches))  # refuses sizes below 1; the largest are refused below
    workloads = tuple(executed.resized(context, max(batches)).workload for context in contexts)
    grid = _SizeGrid(executed, workloads, tuple(batches))
    searched = _searched(grid, preset)
    result = _fastest(grid, _narrowed(grid, _points(searched)))
    if preset:
        return result
    shortest = min(workloads, key=lambda workload: workload.context)
    smaller = [variant for family in searched for variant in regrouped(family)
               if not executed.unsupported(at_workload(variant.template, shortest))]  # fmt: skip
    device_only = [variant for variant in smaller if not variant.template.placement.offload]
    result = _replaced(result, *_fitting(result.fits & (result.host_bytes > 0), grid, device_only))
    return _replaced(result, ~result.fits, grid, smaller)


def _fitting(
    where: np.ndarray, grid: _SizeGrid, searched: Sequence[Family]
) -> tuple[np.ndarray, _SizeGrid, list[Family]]:
    """The masked sizes that any family fits with its fewest drafts (least memory), the grid, and those families."""
    fits = np.zeros_like(where)
    if not where.any():
        return fits, grid, []
    part, place = grid.around(where)
    smallest = [replace(family, gammas=family.gammas[:1], ratios=family.ratios[:1]) for family in searched]
    fitting = _figures(part, _points(smallest)).fits & where[place][:, None]
    fits[place] = fitting.any(axis=1)
    return fits, grid, [family for family, fit in zip(searched, fitting.any(axis=(0, 2)), strict=True) if fit]


def _replaced(result: PlanMap, where: np.ndarray, grid: _SizeGrid, searched: Sequence[Family]) -> PlanMap:
    """The map with the plans of other families at the sizes of a mask, where they are faster or nothing fits."""
    if not where.any():
        return result
    part, place = grid.around(where)
    return _merged(result, _fastest(part, _narrowed(part, _points(searched))), place, where[place])


def at_workload(plan: Plan, workload: Workload) -> Plan:
    """The plan at another workload, with budgets of at most its context."""

    def clamped(part: Any) -> Any:
        return replace(part, budget=min(part.budget, workload.context))

    return replace(
        plan, workload=workload, eviction=clamped(plan.eviction), placement=clamped(plan.placement),
        attention=clamped(plan.attention),
    )  # fmt: skip


@dataclass(frozen=True)
class _SizeGrid:
    """The sizes to evaluate: one workload per context, each with all batches."""

    question: Question
    workloads: tuple[Workload, ...]
    batches: tuple[int, ...]

    @property
    def coarse(self) -> _SizeGrid:
        """A few of its sizes, the smallest and the largest among them."""
        return self.part(_places(len(self.workloads)), _places(len(self.batches)))

    def part(self, rows: Sequence[int], columns: Sequence[int]) -> _SizeGrid:
        """Some of its contexts, with some of its batches."""
        workloads = tuple(self.workloads[row] for row in rows)
        return replace(self, workloads=workloads, batches=tuple(self.batches[column] for column in columns))

    def around(self, where: np.ndarray) -> tuple[_SizeGrid, tuple[np.ndarray, ...]]:
        """The contexts and batches of a mask's sizes, and their places in arrays of this grid."""
        rows, columns = (np.flatnonzero(where.any(axis=axis)).tolist() for axis in (1, 0))
        return self.part(rows, columns), np.ix_(rows, columns)

    @property
    def sizes(self) -> int:
        return len(self.workloads) * len(self.batches)


@dataclass(frozen=True)
class _Points:
    """Plans as arrays [plans] of family index, gamma and ratio; the plans of a family are adjacent."""

    families: tuple[Family, ...]
    family: np.ndarray
    gamma: np.ndarray
    ratio: np.ndarray

    def kept(self, mask: np.ndarray) -> _Points:
        """The plans of a mask [plans], with the families that remain."""
        left, family = np.unique(self.family[mask], return_inverse=True)
        return _Points(tuple(self.families[index] for index in left), family, self.gamma[mask], self.ratio[mask])


@dataclass(frozen=True)
class _PlanFigures:
    """Figures of every plan at every size: [contexts, plans, batches]. fits is False for plans ruled out at a size.

    score: what is minimized, the time per token, at the slow end of its band where rates are a prior.
    """

    tpot_s: np.ndarray
    score: np.ndarray
    ttft_s: np.ndarray
    request_ttft_s: np.ndarray
    peak_bytes: np.ndarray
    host_bytes: np.ndarray
    fits: np.ndarray


def _searched(grid: _SizeGrid, preset: str | None) -> list[Family]:
    """Families at the longest context, where no budget is cut; those that run at the shortest, within any window."""
    ordered = sorted(grid.workloads, key=lambda workload: workload.context)
    shortest, longest = ordered[0], ordered[-1]
    question = grid.question
    if preset:
        question.require_engine_runs(named_plan(preset, longest))
        return [family_of(preset, named_plan(preset, longest))]
    names = {family.name for family in executable_families(replace(question, workload=shortest))}
    known = families(longest, offload=question.options.offload, quality=question.options.quality.loosest)
    executable = [family for family in known if family.name in names]
    return sorted(executable, key=lambda family: preference(family.template))  # ties go to the first


def _points(searched: Sequence[Family]) -> _Points:
    gamma, ratio = (np.concatenate(axis) for axis in zip(*(family.grid() for family in searched), strict=True))
    family = np.repeat(np.arange(len(searched)), [family.size for family in searched])
    return _Points(tuple(searched), family, gamma, ratio)


def _narrowed(grid: _SizeGrid, points: _Points) -> _Points:
    """The plans that are near the fastest, or need the least memory, at some size of a coarser grid."""
    if len(points.gamma) * grid.sizes <= DIRECT:
        return points
    figures = _figures(grid.coarse, points)
    score = np.where(figures.fits, figures.score, np.inf)
    near = (score <= NEAR_FASTEST * score.min(axis=1, keepdims=True)) & np.isfinite(score)
    smallest = figures.peak_bytes == figures.peak_bytes.min(axis=1, keepdims=True)
    return points.kept((near | smallest).any(axis=(0, 2)))


def _places(length: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, length - 1, COARSE)})


def _fastest(grid: _SizeGrid, points: _Points) -> PlanMap:
    """The fastest plan that fits at each size, else the plan with the lowest peak memory."""
    plain_family = family_of("autoregressive", autoregressive(grid.workloads[-1]))
    figures, plain = _figures(grid, points), _figures(grid, _points([plain_family]))
    fits = np.asarray(figures.fits.any(axis=1))
    score = np.where(fits[:, None], np.where(figures.fits, figures.score, np.inf), figures.peak_bytes)
    best = score.argmin(axis=1)

    def at_best(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.take_along_axis(values, best[:, None], axis=1)[:, 0])

    return PlanMap(
        workloads=grid.workloads,
        batches=grid.batches,
        memory_limit_bytes=grid.question.memory_limit_bytes,
        families=points.families,
        index=points.family[best],
        gamma=points.gamma[best],
        ratio=points.ratio[best],
        tpot_s=at_best(figures.tpot_s),
        ttft_s=at_best(figures.ttft_s),
        request_ttft_s=at_best(figures.request_ttft_s),
        peak_bytes=at_best(figures.peak_bytes),
        host_bytes=at_best(figures.host_bytes),
        fits=fits,
        plain_tpot_s=plain.tpot_s[:, 0],
        plain_fits=plain.fits[:, 0],
    )


def _merged(first: PlanMap, second: PlanMap, place: tuple[np.ndarray, ...], where: np.ndarray) -> PlanMap:
    """The first map with plans of the second where `where` allows it and the second is faster or the first fits none.

    The second map covers the sizes `place` of the first.
    """
    faster = second.fits & (second.tpot_s < first.tpot_s[place])
    changed = where & (faster | ~first.fits[place])

    def taken(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        merged = ours.copy()
        merged[place] = np.where(changed, theirs, ours[place])
        return merged

    names = (
        "gamma", "ratio", "tpot_s", "ttft_s", "request_ttft_s", "peak_bytes", "host_bytes", "fits", "plain_tpot_s",
        "plain_fits",
    )  # fmt: skip
    figures: dict[str, Any] = {name: taken(getattr(first, name), getattr(second, name)) for name in names}
    index = taken(first.index, second.index + len(first.families))
    return replace(first, families=(*first.families, *second.families), index=index, **figures)


def _figures(grid: _SizeGrid, points: _Points) -> _PlanFigures:
    question, shape, machine = grid.question, grid.question.shape, grid.question.machine
    templates = [[at_workload(family.template, workload) for family in points.families] for workload in grid.workloads]
    counts = np.bincount(points.family)
    shaped = (len(grid.workloads), len(points.gamma), 1)
    flat = [strategy_of(plan, shape, machine, 1.0) for row in templates for plan in row]
    strategy = reshaped(stack(flat, list(counts) * len(templates)), shaped).with_terms(
        context=np.array([workload.context for workload in grid.workloads], dtype=float)[:, None, None],
        batch=np.ceil(np.array(grid.batches, dtype=float) / shape.parallel.data),
        gamma=points.gamma[:, None],
        draft_ratio=points.ratio[:, None],
        acceptance=_acceptance(question, templates, points)[:, :, None],
    )
    rates = stack([rates_of(family.template, shape, machine) for family in points.families], list(counts))
    estimate = evaluate(shape, machine, strategy, reshaped(rates, shaped[1:]))
    full = (*shaped[:2], len(grid.batches))
    tpot_s, ttft_s, request_ttft_s, peak, host = (
        np.broadcast_to(np.asarray(figure, dtype=float), full)
        for figure in (
            estimate.tpot_s, estimate.ttft_s, estimate.request_ttft_s, estimate.memory.peak, estimate.host_bytes,
        )
    )  # fmt: skip
    allowed = np.array([[not exceeds_window(plan, shape) for plan in row] for row in templates])[:, points.family, None]
    score = tpot_s * (1 + _spreads(grid, templates)[:, points.family])
    return _PlanFigures(tpot_s, score, ttft_s, request_ttft_s, peak, host, allowed & question.fits(peak, host))


def _spreads(grid: _SizeGrid, templates: Sequence[Sequence[Plan]]) -> np.ndarray:
    """The spread of each family's rates where they are a prior, else 0: [contexts, families, batches].

    That of an engine's step depends on its size; that of kernels does not.
    """
    question = grid.question
    engine, shape = question.engine, question.shape

    def of_plan(plan: Plan) -> list[float]:
        if engine is None or engine.is_measured(plan, shape):
            return [unmeasured_spread(plan, question) if engine is None else 0.0] * len(grid.batches)
        sized = (replace(plan, workload=replace(plan.workload, batch=batch)) for batch in grid.batches)
        return [unmeasured_spread(each, question) for each in sized]

    rows = templates[:1] if engine is None else templates
    spreads = np.array([[of_plan(plan) for plan in row] for row in rows])
    return np.broadcast_to(spreads, (len(templates), *spreads.shape[1:]))


def _acceptance(question: Question, templates: Sequence[Sequence[Plan]], points: _Points) -> np.ndarray:
    """Conditional acceptance of every plan's drafts: [contexts, plans]."""
    model = AcceptanceModel.of_profile(question.shape, 1, question.profile)
    starts = np.flatnonzero(np.diff(points.family, prepend=-1, append=-1))
    grids = [(points.gamma[first:last], points.ratio[first:last]) for first, last in pairwise(starts)]
    at_contexts = (replace(model, context=row[0].workload.context) for row in templates)
    return np.array([
        np.concatenate(at_context.competing_of_all(row, grids))
        for at_context, row in zip(at_contexts, templates, strict=True)
    ])  # fmt: skip
