"""The joint search: the grids of all families of plans in one vectorized evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.plan import Plan, Workload, require
from ridgeplan.planner.policies.selection.all import autoregressive
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.presets import PRESETS
from ridgeplan.planner.quality import Quality, losses, quality_of
from ridgeplan.planner.recommendation import GIB, Alternative, Recommendation
from ridgeplan.planner.resolution import resolve, workload_for
from ridgeplan.planner.search_space import Family, families
from ridgeplan.planner.support import missing_architecture, missing_execution
from ridgeplan.roofline.catalog.mistakes import brief
from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.placement import resident_memory

MAX_UNNAMED = 8
MAX_MEMORY_BYTES = 10**18
Choice = TypeVar("Choice", bound=StrEnum)


class Objective(StrEnum):
    """What is minimized: time per token, time of the whole request, or peak memory."""

    LATENCY = "latency"
    TOTAL = "total"
    MEMORY = "memory"


class NothingFits(ValueError):
    """No executable plan of the allowed quality fits into memory."""


@dataclass(frozen=True)
class Question:
    """The inputs of a search."""

    shape: ModelShape
    profile: Profile
    workload: Workload
    quality: Quality
    objective: Objective
    memory_limit_bytes: float

    @property
    def machine(self) -> Machine:
        """The profile's machine with the memory limit."""
        return replace(Machine.of(self.profile), memory_bytes=self.memory_limit_bytes)


@dataclass(frozen=True)
class Candidate:
    """The best plan of a family: its objective (lower is better) and its peak memory."""

    name: str
    plan: Plan
    score: float
    tpot_s: float
    peak_bytes: float

    def rejection(self, question: Question) -> str | None:
        """Why this plan cannot be recommended, however fast; None if it can."""
        if self.peak_bytes > question.memory_limit_bytes:
            needed, limit = self.peak_bytes / GIB, question.memory_limit_bytes / GIB
            return f"does not fit: needs {needed:.1f} GiB of {limit:.1f} GiB"
        if not question.quality.allows(quality_of(self.plan)):
            return f"quality: {'; '.join(losses(self.plan))}"
        missing = missing_execution(self.plan, question.shape)
        return f"estimated only, the runtime cannot execute {', '.join(missing)} yet" if missing else None


def recommend(
    model: str | ModelShape,
    gpu: str,
    ctx: int,
    *,
    batch: int = 1,
    new_tokens: int = 1024,
    quality: str = "near-lossless",
    objective: str = "latency",
    memory_limit: float | None = None,
    profile: Profile | str | None = None,
    acceptance: str | None = None,
    yarn: bool = False,
) -> Recommendation:
    """The best executable plan for a model on a machine at a context and batch, with its prediction.

    `model` is a catalog name, a config.json, a GGUF, a hub id in the local cache, or a ModelShape; `gpu` a catalog
    name, a TOML file or "auto". `quality` limits what the target may give up (exact, near-lossless, lossy),
    `memory_limit` (bytes) overrides the machine's memory, `profile` is a calibration or its file, `acceptance` a file
    of `ridgeplan acceptance`. Raises PlanError, UnknownModel, UnknownHardware, ProfileError (all ValueError) for bad
    input, and NothingFits.
    """
    wanted, aim = _choice(Quality, "quality", quality), _choice(Objective, "objective", objective)
    shape, used = resolve(model, gpu, profile, acceptance)
    workload = workload_for(shape, used, ctx, new_tokens, batch, yarn=yarn)
    question = Question(shape, used, workload, wanted, aim, _memory_limit(memory_limit, used))
    candidates = sorted(search(question), key=lambda one: one.score)
    chosen = next((one for one in candidates if one.rejection(question) is None), None)
    if chosen is None:
        raise NothingFits(_why_nothing_fits(candidates, question))
    others = _others(candidates, chosen, question)
    plans = [autoregressive(workload), chosen.plan, *(one.plan for one in others)]
    baseline, *predicted = predict_all(plans, shape, used, question.machine)
    best, *rest = (prediction.against(baseline) for prediction in predicted)
    return Recommendation(
        plan=chosen.plan,
        name=chosen.name,
        predicted=best,
        baseline=baseline,
        alternatives=tuple(
            Alternative(one.name, one.plan, prediction, one.rejection(question) or _slower(one, chosen, question))
            for one, prediction in zip(others, rest, strict=True)
        ),
        losses=tuple(losses(chosen.plan)),
        notes=tuple(notes(shape, used, workload)),
        memory_limit_bytes=question.memory_limit_bytes,
    )


def search(question: Question) -> list[Candidate]:
    """The best plan of every family, from one evaluation of all their grids."""
    searched = families(question.workload, offload=not fits_whole(question))
    model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
    machine = question.machine
    templates = [strategy_of(family.template, question.shape, machine, 1.0) for family in searched]
    rates = [rates_of(family.template, question.shape, machine) for family in searched]
    grids = [family.grid() for family in searched]
    gamma, ratio = (np.concatenate(axis) for axis in zip(*grids, strict=True))
    acceptance = np.concatenate(
        [model.best(family.template, *grid) for family, grid in zip(searched, grids, strict=True)]
    )
    sizes = [family.size for family in searched]
    strategy = replace(stack(templates, sizes), gamma=gamma, draft_ratio=ratio, acceptance=acceptance)
    estimate = evaluate(question.shape, machine, strategy, stack(rates, sizes))
    return list(_best_of_each(searched, (gamma, ratio), estimate, question))


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
    tpot, peak = (np.broadcast_to(array, (size,)) for array in (estimate.tpot_s, estimate.memory.peak))
    score = _score(estimate, question, size)
    fits = peak <= question.memory_limit_bytes
    start = 0
    for family in searched:
        part = slice(start, start + family.size)
        start += family.size
        ranked = np.where(fits[part], score[part], math.inf) if fits[part].any() else peak[part]
        best = part.start + int(np.argmin(ranked))
        if family.template.placement.offload and family.name not in PRESETS and not offloaded[best]:
            continue
        plan = family.plan(*(axis[best] for axis in grid))
        yield Candidate(family.name, plan, float(score[best]), float(tpot[best]), float(peak[best]))


def _score(estimate: Estimate, question: Question, size: int) -> np.ndarray:
    value = {
        Objective.LATENCY: estimate.tpot_s,
        Objective.TOTAL: estimate.ttft_s + question.workload.new_tokens * estimate.tpot_s,
        Objective.MEMORY: estimate.memory.peak,
    }[question.objective]
    return np.broadcast_to(np.asarray(value, dtype=float), (size,))


def _others(candidates: list[Candidate], chosen: Candidate, question: Question) -> list[Candidate]:
    """All presets and the best few other families: first the slower ones, then those that are ruled out."""
    unnamed = [one for one in candidates if one.name not in PRESETS]
    listed = [one for one in candidates if one is not chosen and (one.name in PRESETS or one in unnamed[:MAX_UNNAMED])]
    return sorted(listed, key=lambda one: one.rejection(question) is not None)


def _slower(one: Candidate, chosen: Candidate, question: Question) -> str:
    if question.objective is Objective.MEMORY:
        return f"larger: {one.peak_bytes / chosen.peak_bytes:.2f}x the recommended plan's memory"
    return f"slower: {one.score / chosen.score:.2f}x the recommended plan's time"


def _why_nothing_fits(candidates: list[Candidate], question: Question) -> str:
    """One line that names the allowed plan with the smallest memory."""
    unlimited = replace(question, memory_limit_bytes=math.inf)
    allowed = [one for one in candidates if one.rejection(unlimited) is None]
    workload, limit = question.workload, question.memory_limit_bytes / GIB
    least = min(allowed, key=lambda one: one.peak_bytes)
    return (
        f"nothing fits: {workload.model} at context {workload.context}, batch {workload.batch} needs at least "
        f"{least.peak_bytes / GIB:.1f} GiB ({least.name}) of {limit:.1f} GiB on {workload.hardware}"
    )


def notes(shape: ModelShape, profile: Profile, workload: Workload) -> Iterator[str]:
    """Caveats of any prediction for this model, machine and workload."""
    missing = missing_architecture(shape)
    if missing:
        yield missing
    if workload.yarn_factor > 1:
        yield f"rotary embeddings are stretched {workload.yarn_factor:g}x by YaRN"
    elif workload.final_context > shape.max_context:
        yield (
            f"{workload.final_context} tokens are beyond the model's limit of {shape.max_context}; "
            "ask for YaRN to stretch its rotary embedding"
        )
    if profile.transferred_from:
        yield f"{profile.hardware.name} is not calibrated: utilizations are those of {profile.transferred_from}"


def _memory_limit(given: float | None, profile: Profile) -> float:
    if given is None:
        return float(profile.hardware.memory_bytes)
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    allowed = f"bytes above 0 up to {MAX_MEMORY_BYTES:.0e}"
    require(number and 0 < given <= MAX_MEMORY_BYTES, f"memory_limit is {brief(given)}; allowed: {allowed}")
    return float(given)


def _choice(kind: type[Choice], name: str, value: str) -> Choice:
    allowed = [str(member) for member in kind]
    require(value in allowed, f"{name} is {brief(value)}; allowed: {', '.join(allowed)}")
    return kind(value)
