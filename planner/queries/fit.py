"""Largest contexts and batches that fit a GPU, or every GPU of the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ridgeplan.planner.capacity import Capacity
from ridgeplan.planner.feasibility import (
    NothingFits,
    context_limits,
    executable_families,
    fewest_gpus,
    more_gpus,
    smallest_plans,
)
from ridgeplan.planner.parallelism import divided
from ridgeplan.planner.quantities import size_text
from ridgeplan.planner.question import Question, SearchOptions, ask
from ridgeplan.planner.recommend import preference, recommend
from ridgeplan.planner.recommendation import Fix
from ridgeplan.planner.render.tables import Lines, Table
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search import named_plan
from ridgeplan.roofline.catalog.hardware import Hardware, list_hardware
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.plan.plan import MAX_BATCH, Plan, require
from ridgeplan.roofline.plan.presets import divided_name, preset_name
from ridgeplan.roofline.plan.support import Backend

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = tuple(1 << power for power in range(12, 21))


@dataclass(frozen=True)
class FitRow:
    """The largest size that fits, the plan that reaches it, its peak, and what limits it.

    If not even size 1 fits, the size is 0, the plan is empty, and the peak is the least of size 1. `limited_by` is
    "memory", "model" (the context limit or the sliding window), or "plan" (the largest batch that a plan may have).
    """

    context: int
    batch: int
    plan: str
    peak_bytes: float
    limited_by: str


@dataclass(frozen=True, repr=False)
class FitResult(Table):
    """What fits a machine: the largest context for each batch, and the largest batch for each context.

    fixes: what would make the smallest size fit, where it does not.
    """

    model: str
    hardware: str
    contexts: tuple[FitRow, ...]
    batches: tuple[FitRow, ...]
    notes: tuple[str, ...]
    memory_limit_bytes: float
    fixes: tuple[Fix, ...] = ()

    chart = Lines(("batch",), "context", "tokens of context")

    def table(self) -> list[dict[str, Any]]:
        """A flat row per size: the largest context of each batch, then the largest batch of each context."""
        return [asdict(row) for row in (*self.contexts, *self.batches)]

    def summary(self) -> str:
        """The largest context at the smallest batch, in one line."""
        first = self.contexts[0] if self.contexts else self.batches[0]
        limit = size_text(self.memory_limit_bytes)
        return f"{self.model} on {self.hardware}, {limit}: {first.context} tokens at batch {first.batch}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what would help where the smallest size does not fit."""
        return {name: value for name, value in asdict(self).items() if name != "fixes" or value}


def fit(
    model: str | ModelShape,
    gpu: str,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = (),
    preset: str | None = None,
    options: SearchOptions | None = None,
    **changes: Any,
) -> FitResult:
    """The largest context for each of `batches`, and the largest batch for each of `contexts`.

    Answers for the preset, or for whichever executable plan reaches the most; of several that reach as much, for the
    most exact and then the simplest. `contexts` default to the powers of 2 up to the model's limit. `offload` defaults
    to False here, as plans with layers on the host are slow. Other options, and errors, are those of `recommend`.
    """
    options = SearchOptions.of(options, changes, offload=False)
    sizes = _sizes(model, gpu, batches, contexts, preset, options)
    if any(row.plan for row in (sizes.batches if contexts else sizes.contexts)):
        return sizes
    context, batch = min(contexts, default=1), min(batches, default=1)
    return replace(sizes, fixes=remedies(model, gpu, context, batch, preset=preset, options=options))


def _sizes(
    model: str | ModelShape, gpu: str, batches: Sequence[int], contexts: Sequence[int], preset: str | None,
    options: SearchOptions,
) -> FitResult:  # fmt: skip
    question = ask(model, gpu, 1, options)
    refused = f"offload is set; allowed: without it, as CPU and GPU of {gpu} share one memory"
    require(question.options.offload or not options.offload or options.several_gpus, refused)
    longest = longest_context(question.shape, question.options.new_tokens, yarn=question.options.yarn)
    sizes = contexts or tuple(context for context in CONTEXTS if context <= longest) or (longest,)
    question.resized(max(sizes), max(batches, default=1))  # refuses sizes out of range before any is searched for
    reached = [_largest("context", question, (longest, batch), preset) for batch in batches]
    possible = [_largest("batch", question, (context, 1), preset) for context in sizes]
    stretched = f"contexts are stretched by YaRN, without which they end at {question.shape.max_context}"
    return FitResult(
        model=question.shape.name,
        hardware=question.profile.hardware.name,
        contexts=tuple(reached),
        batches=tuple(possible),
        notes=(*question.notes(), *question.limit_notes(), *([stretched] if options.yarn else [])),
        memory_limit_bytes=question.memory_limit_bytes,
    )


def remedies(
    model: str | ModelShape, gpu: str, context: int, batch: int, *, preset: str | None, options: SearchOptions
) -> tuple[Fix, ...]:
    """What would make a size fit that does not: more GPUs for a preset, else all that `recommend` offers."""
    if preset:
        gpus = fewest_gpus(ask(model, gpu, context, options, batch=batch), preset)
        return (more_gpus(gpus, gpu),) if gpus else ()
    try:
        recommend(model, gpu, context, options, batch=batch)
    except NothingFits as error:
        return error.fixes
    return ()


@dataclass(frozen=True)
class GpuFit:
    """Whether the requested size fits a GPU, the largest context at its batch, and the largest batch at its context.

    memory_bytes: as the driver reports it. gpus: the fewest that hold the size, of 1, 2, 4, 8 and 16; 1 if none do.
    """

    gpu: str
    gpus: int
    memory_bytes: float
    fits: bool
    context: FitRow
    batch: FitRow


def fit_gpus(
    model: str | ModelShape,
    context: int,
    batch: int,
    *,
    preset: str | None = None,
    options: SearchOptions | None = None,
    **changes: Any,
) -> tuple[GpuFit, ...]:
    """What fits every GPU of the catalog, from the smallest; where none does, what fits several of each.

    Several share the model by tensor and pipeline parallelism. Options and errors are those of `fit`.
    """
    options = SearchOptions.of(options, changes, offload=False)
    gpus = sorted(list_hardware(), key=lambda gpu: gpu.memory_bytes)
    rows = [_gpu_fit(model, gpu, context, batch, preset, options) for gpu in gpus]
    no_others = options.gpus or options.several_gpus or options.backend is Backend.ANY or preset
    if not no_others and not any(row.fits for row in rows):
        rows = [_several_fit(model, gpu, context, batch, options) or row for gpu, row in zip(gpus, rows, strict=True)]
    return tuple(rows)


def _several_fit(
    model: str | ModelShape, gpu: Hardware, context: int, batch: int, options: SearchOptions
) -> GpuFit | None:
    """What the fewest of a GPU fit that hold the size; None where no number does."""
    shared = replace(options, data_parallel=1, expert_parallel=False, batch=batch)
    gpus = fewest_gpus(ask(model, gpu.name, context, _limited(shared, gpu)))
    return _gpu_fit(model, gpu, context, batch, None, replace(shared, gpus=gpus)) if gpus else None


def _limited(options: SearchOptions, gpu: Hardware) -> SearchOptions:
    """The options with at most a GPU's memory as their limit."""
    limit = None if options.memory_limit is None else min(options.memory_limit, gpu.memory_bytes)
    return replace(options, memory_limit=limit, offload=options.offload and not gpu.shares_host_memory)


def _gpu_fit(
    model: str | ModelShape, gpu: Hardware, context: int, batch: int, preset: str | None, options: SearchOptions
) -> GpuFit:
    limited = _limited(options, gpu)
    fits = _sizes(model, gpu.name, (batch,), (context,), preset, limited)
    longest, largest = fits.contexts[0], fits.batches[0]
    return GpuFit(gpu.name, options.gpus or 1, gpu.memory_bytes, largest.batch >= batch, longest, largest)


def _largest(size: str, question: Question, at: tuple[int, int], preset: str | None) -> FitRow:
    """The row of the degrees of parallelism that reach most at a context and batch; of equals, that of least memory.

    size: which of the two grows, "context" or "batch".
    """
    sharded = (each.resized(*at).as_executed for each in divided(question)[0].values())
    rows = [_largest_size(size, each, preset) for each in sharded]
    return min(rows, key=lambda row: (-row.context, -row.batch, row.peak_bytes))


def _largest_size(size: str, question: Question, preset: str | None) -> FitRow:
    """The largest context for the question's batch, or batch for its context.

    To find a context, the question has the longest one, because a policy's budget is at most its workload's context.
    """
    plans, workload = _plans(question, preset), question.workload
    capacity = Capacity(plans, question.shape, question.machine, question.host_limit_bytes)
    if size == "context":
        limits, limit = context_limits(plans, question), "model"
        sizes = capacity.largest_contexts(limits)
    else:
        limits, limit = np.full(len(plans), MAX_BATCH), "plan"
        sizes = capacity.largest_batches()
    peaks = capacity.peaks(**{size: np.maximum(sizes, 1)})
    best = int(np.argmax(sizes) if sizes.any() else np.argmin(peaks))
    reached = {"context": workload.context, "batch": workload.batch, size: int(sizes[best])}
    name = divided_name(preset_name(plans[best]), plans[best]) if sizes[best] else ""
    limited_by = limit if sizes[best] == limits[best] else "memory"
    return FitRow(**reached, plan=name, peak_bytes=float(peaks[best]), limited_by=limited_by)


def _plans(question: Question, preset: str | None) -> list[Plan]:
    """The preset, or the smallest executable plan of every family, in order of preference.

    Among plans that differ only in the size of quantization groups, the default size comes first.
    """
    if preset:
        question.require_engine_runs(named_plan(preset, question.workload))
        return [named_plan(preset, question.workload)]
    running = [*executable_families(question), *executable_families(question, regroup=True)]
    return sorted(smallest_plans(running), key=preference)
