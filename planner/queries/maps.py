"""Maps of the recommended plan over many contexts and batches at once.

All sizes are evaluated at once. A large search space is first narrowed to plans that are near the fastest at a few
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ridgeplan.planner.feasibility import executable_families, regrouped
from ridgeplan.planner.parallelism import TOLERANCE as DEGREES_TOLERANCE
from ridgeplan.planner.parallelism import divided, preferred_degrees
from ridgeplan.planner.question import Question
from ridgeplan.planner.recommend import (
    TOLERANCE,
    chosen_of_each,
    contenders,
    preference,
    preference_ranks,
    ranked,
    undominated,
    unmeasured_spread,
    worth_offloading,
)
from ridgeplan.planner.search import (
    Candidate,
    Family,
    Figures,
    at_workload,
    family_of,
    figures_of,
    named_plan,
    plan_at,
    question_families,
)
from ridgeplan.roofline.plan.plan import Plan, Workload, require
from ridgeplan.roofline.plan.policies.dense import autoregressive
from ridgeplan.roofline.plan.support import exceeds_window

MAX_SIZES = 65_536  # of a grid
DIRECT = 1_000_000  # plans x sizes that are evaluated without narrowing
COARSE = 4  # sizes along either axis at which plans are narrowed
NEAR_FASTEST = 1.06  # times the fastest there
NEAR_BEST = 1.01  # times the best of a family


@dataclass(frozen=True)
class PlanMap(Figures):
    """The recommended plans of a grid, beside plain decoding. Arrays are [contexts, batches]; seconds and bytes.

    workloads: one per context. index: the plan's place in `families`. score: what is minimized. fits: whether any plan
    does; where none does, the figures are those of the plan that needs the least memory.
    """

    workloads: tuple[Workload, ...]
    batches: tuple[int, ...]
    memory_limit_bytes: float
    families: tuple[Family, ...]
    index: np.ndarray
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
        family, at = self.families[self.index[row, column]], (row, column)
        parallel = family.template.workload.parallel
        workload = replace(self.workloads[row], batch=self.batches[column], parallel=parallel)
        return plan_at(family, workload, self.gamma[at], self.ratio[at], self.depth[at], self.memory_limit_bytes)

    def replaced(self, other: PlanMap, where: np.ndarray) -> PlanMap:
        """The map with the plans of another one, of the same sizes, at those of a mask."""
        first, second = ({name: value for name, value in vars(each).items() if isinstance(value, np.ndarray)}
                         for each in (self, replace(other, index=other.index + len(self.families))))  # fmt: skip
        arrays: dict[str, Any] = {name: np.where(where, second[name], first[name]) for name in first}
        return replace(self, families=(*self.families, *other.families), **arrays)


def plan_map(question: Question, contexts: Sequence[int], batches: Sequence[int], preset: str | None = None) -> PlanMap:
    """`degree_map` at the degrees of parallelism that `recommend` chooses at each size."""
    questions, _ = divided(question)
    searched = [_searched_sizes(sharded, contexts, batches, preset) for sharded in questions.values()]
    fastest = np.stack([each.fastest_score for each in searched])
    slowest = fastest.min(axis=0) * (1 + TOLERANCE) * (1 + DEGREES_TOLERANCE)  # whose choice may still be the best
    maps = [each.plan_map(not preset and score <= slowest) for each, score in zip(searched, fastest, strict=True)]
    stacked = (np.stack([getattr(each, name) for each in maps]) for name in ("score", "peak_bytes", "fits"))
    chosen = preferred_degrees([*questions], *stacked)
    merged = maps[0]
    for index, other in enumerate(maps[1:], 1):
        merged = merged.replaced(other, chosen == index)
    return merged


def degree_map(
    question: Question, contexts: Sequence[int], batches: Sequence[int], preset: str | None = None
) -> PlanMap:
    """The plan that `recommend` chooses, at every size; of a preset, its fastest gamma and ratio, if it runs or not.

    `question` says which model, machine, quality and memory; its own context and batch are not used. Where no plan
    fits, or the fastest leaves layers on the host, all sizes of quantization groups are tried, as by `recommend`.
    Raises PlanError for sizes out of range.
    """
    return _searched_sizes(question, contexts, batches, preset).plan_map(not preset)


def _searched_sizes(
    question: Question, contexts: Sequence[int], batches: Sequence[int], preset: str | None
) -> _BestOfFamilies:
    """The best plan of every family that runs, or of the preset."""
    sizes = len(contexts) * len(batches)
    require(0 < sizes <= MAX_SIZES, f"{len(contexts)} contexts x {len(batches)} batches; allowed: 1 to {MAX_SIZES}")
    executed = question.as_executed
    executed.resized(min(contexts), min(batches))  # refuses sizes below 1; the largest are refused below
    workloads = tuple(executed.resized(context, max(batches)).workload for context in contexts)
    grid = _SizeGrid(executed, workloads, tuple(batches))
    searched = _searched(grid, preset)
    if preset:
        return _BestOfFamilies.of(grid, searched)
    on_device = [family for family in searched if not family.template.placement.offload]
    offloading = [family for family in searched if family.template.placement.offload]
    best = _BestOfFamilies.of(grid, on_device).joined(~grid.plain.fits[:, 0], offloading)
    shortest = min(workloads, key=lambda workload: workload.context)
    smaller = [variant for family in searched for variant in regrouped(family)
               if not executed.unsupported(at_workload(variant.template, shortest))]  # fmt: skip
    device_only = [variant for variant in smaller if not variant.template.placement.offload]
    best = best.joined(*_fitting(best.offloads, grid, device_only))
    return best.joined(np.logical_not(best.figures.fits.any(axis=1)), smaller)


def _fitting(where: np.ndarray, grid: _SizeGrid, searched: Sequence[Family]) -> tuple[np.ndarray, list[Family]]:
    """The masked sizes that any family fits with its fewest drafts (least memory), and those families."""
    fits = np.zeros_like(where)
    if not where.any():
        return fits, []
    part, (rows, columns) = grid.around(where)
    place = np.ix_(rows, columns)
    smallest = [replace(family, gammas=family.gammas[:1], ratios=family.ratios[:1]) for family in searched]
    fitting = _figures(part, smallest).best_of_families.fits & where[place][:, None]
    fits[place] = fitting.any(axis=1)
    return fits, [family for family, fit in zip(searched, fitting.any(axis=(0, 2)), strict=True) if fit]


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

    def around(self, where: np.ndarray) -> tuple[_SizeGrid, tuple[list[int], list[int]]]:
        """The contexts and batches of a mask's sizes, and their indices in this grid."""
        rows, columns = (np.flatnonzero(where.any(axis=axis)).tolist() for axis in (1, 0))
        return self.part(rows, columns), (rows, columns)

    @cached_property
    def plain(self) -> Figures:
        """Plain decoding at every size."""
        return _figures(self, [family_of("autoregressive", autoregressive(self.workloads[-1]))]).best_of_families

    @property
    def sizes(self) -> int:
        return len(self.workloads) * len(self.batches)


def _searched(grid: _SizeGrid, preset: str | None) -> list[Family]:
    """Families at the longest context, where no budget is cut; those that run at the shortest, within any window."""
    ordered = sorted(grid.workloads, key=lambda workload: workload.context)
    shortest, longest = ordered[0], ordered[-1]
    question = grid.question
    if preset:
        question.require_engine_runs(named_plan(preset, longest))
        return [family_of(preset, named_plan(preset, longest))]
    names = {family.name for family in executable_families(replace(question, workload=shortest))}
    known = question_families(question, question.options.offload, longest)
    executable = [family for family in known if family.name in names]
    return sorted(executable, key=lambda family: preference(family.template))  # ties go to the first


def _narrowed(grid: _SizeGrid, searched: Sequence[Family]) -> list[Family]:
    """The families with the gammas and ratios of plans that need the least memory at some size of a coarser grid, or
    are near the fastest and the best of their family there.
    """
    if sum(family.size for family in searched) * grid.sizes <= DIRECT:
        return [*searched]
    figures = _figures(grid.coarse, searched)
    score = np.where(figures.fits, figures.score, np.inf)
    near = (score <= NEAR_BEST * score.min(axis=2, keepdims=True)) & np.isfinite(score)
    near &= score <= NEAR_FASTEST * score.min(axis=(1, 2), keepdims=True)
    smallest = figures.peak_bytes == figures.peak_bytes.min(axis=(1, 2), keepdims=True)
    kept = (near | smallest).any(axis=(0, 3))
    axes = {"gammas": figures.gamma.astype(int), "ratios": figures.ratio, "depths": figures.depth.astype(int)}

    def kept_of(place: int) -> dict[str, Any]:
        return {name: tuple(np.unique(each[0, place, kept[place], 0]).tolist()) for name, each in axes.items()}

    return [replace(each, **kept_of(place)) for place, each in enumerate(searched) if kept[place].any()]


def _places(length: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, length - 1, COARSE)})


@dataclass(frozen=True)
class _BestOfFamilies:
    """The best plan of each family at each size, as `search` finds it; figures: [contexts, families, batches]."""

    grid: _SizeGrid
    families: tuple[Family, ...]
    figures: Figures

    @classmethod
    def of(cls, grid: _SizeGrid, searched: Sequence[Family]) -> _BestOfFamilies:
        """Those of some families; a large space is narrowed."""
        narrowed = _narrowed(grid, searched)
        return cls(grid, tuple(narrowed), _figures(grid, narrowed).best_of_families)

    @property
    def offloads(self) -> np.ndarray:
        """Whether the fastest plan fits, but with layers on the host: [contexts, batches]."""
        fastest = self.figures.at(self.figures.best(axis=1), axis=1)
        return np.asarray(fastest.fits & (fastest.host_bytes > 0))

    def joined(self, where: np.ndarray, searched: Sequence[Family]) -> _BestOfFamilies:
        """With other families, at the sizes of a mask."""
        if not where.any() or not searched:
            return self
        part, (rows, columns) = self.grid.around(where)
        other = _BestOfFamilies.of(part, searched)
        figures = {}
        for name, values in vars(self.figures).items():
            elsewhere = values.dtype.type(math.inf if name == "peak_bytes" else 0)
            placed = np.full((len(where), len(other.families), where.shape[1]), elsewhere)
            placed[np.ix_(rows, range(len(other.families)), columns)] = getattr(other.figures, name)
            figures[name] = np.concatenate((values, np.where(where[:, None], placed, elsewhere)), axis=1)
        return replace(self, families=(*self.families, *other.families), figures=Figures(**figures))

    @property
    def fastest_score(self) -> np.ndarray:
        """What the best plan minimizes; infinite where none fits: [contexts, batches]."""
        return np.where(self.figures.fits, self.figures.score, np.inf).min(axis=1)

    def chosen(self, where: np.ndarray | bool) -> np.ndarray:
        """The family that `recommend` chooses at the sizes of a mask, elsewhere the fastest: [contexts, batches]."""
        figures, question = self.figures, self.grid.question
        fits_device = (figures.fits & (figures.host_bytes == 0)).any(axis=1, keepdims=True)
        worth = worth_offloading(figures.host_bytes, figures.tpot_s, self.grid.plain.tpot_s)
        figures = replace(figures, fits=figures.fits & (worth | ~fits_device))
        best, scores = figures.best(axis=1)[:, 0], np.where(figures.fits, figures.score, np.inf).swapaxes(1, 2)
        ranks = preference_ranks([family.template for family in self.families])
        contested: dict[tuple[int, int], dict[Candidate, int]] = {}
        kept = undominated(scores, ranks, question) & np.asarray(where)[..., None]
        for row, column, place in np.argwhere(kept & (kept.sum(axis=2, keepdims=True) > 1)).tolist():
            contested.setdefault((row, column), {})[self.candidate(row, place, column)] = place
        winners = chosen_of_each([contenders(ranked(each), question) for each in contested.values()], question)
        for (at, places), winner in zip(contested.items(), winners, strict=True):
            best[at] = places[winner]
        return best

    def candidate(self, row: int, place: int, column: int) -> Candidate:
        """The best plan of the family with an index, at the context and the batch with these indices."""
        grid, at = self.grid, (row, place, column)
        workload = replace(grid.workloads[row], batch=grid.batches[column])
        return self.figures.candidate(self.families[place], grid.question, workload, at)

    def plan_map(self, where: np.ndarray | bool) -> PlanMap:
        """The map of the plans that are `chosen`."""
        grid, index = self.grid, self.chosen(where)
        figures = self.figures.at(index[:, None], axis=1)
        return PlanMap(
            workloads=grid.workloads, batches=grid.batches, memory_limit_bytes=grid.question.memory_limit_bytes,
            families=self.families, index=index, plain_tpot_s=grid.plain.tpot_s[:, 0],
            plain_fits=grid.plain.fits[:, 0], **vars(figures),
        )  # fmt: skip


def _figures(grid: _SizeGrid, searched: Sequence[Family]) -> Figures:
    """Every plan at every size, where a window does not rule it out, at the slow end of its band."""
    shape = grid.question.shape
    templates = [[at_workload(family.template, workload) for family in searched] for workload in grid.workloads]
    allowed = np.array([[not exceeds_window(plan, shape) for plan in row] for row in templates])
    figures = figures_of(searched, grid.question, grid.workloads, grid.batches)
    score = figures.score * (1 + _spreads(grid, templates)[:, :, None])
    return replace(figures, score=score, fits=figures.fits & allowed[:, :, None, None])


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
