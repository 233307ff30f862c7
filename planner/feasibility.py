"""Feasibility: which plans fit and run, why none does, and which changes to the question would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter

import numpy as np

from ridgeplan.planner.capacity import Capacity, described_contexts, usable_bytes
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.quantities import GB, size_text
from ridgeplan.planner.question import Question
from ridgeplan.planner.recommendation import Fix
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search import Candidate, Family, families, search
from ridgeplan.roofline.catalog.hardware import Hardware, list_hardware
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS, QUANTIZATION_GROUPS
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.roofline.plan.policies.base import unpriced
from ridgeplan.roofline.plan.presets import describe, preset_name
from ridgeplan.roofline.plan.support import allows_chunks, exceeds_window


def runnable_families(question: Question, *, regroup: bool = False) -> list[Family]:
    """Families that run and are allowed; with `regroup` each with every size of quantization groups, and evictions also
    with prompts that go through in chunks.

    Larger groups have fewer scales, smaller ones a smaller buffer in full precision; chunks have a smaller workspace.
    They are only searched where the usual ones do not fit. Layers may be on the host if the question allows it.
    """
    known = families(question.workload, offload=question.offload, quality=question.quality)
    running = [family for family in known if runs(family.template, question)]
    return [one for family in running for one in regrouped(family)] if regroup else running


def smallest_plans(searched: Sequence[Family]) -> list[Plan]:
    """The plan of each family that takes the least memory: that with the fewest drafts."""
    return [family.plan(min(family.gammas), family.ratios[0]) for family in searched]


def context_limits(plans: Sequence[Plan], question: Question) -> np.ndarray:
    """The longest context that each plan may have for the question's model, new tokens and use of YaRN: [plans].

    Beyond a sliding window only plain decoding runs.
    """
    workload, shape = question.workload, question.shape
    longest = longest_context(shape, workload.new_tokens, yarn=workload.yarn_factor > 1)
    within_window = max((shape.window_tokens or longest) - workload.new_tokens, 0)
    long = replace(workload, context=longest)
    bounded = [exceeds_window(replace(plan, workload=long), shape) for plan in plans]
    return np.where(bounded, min(within_window, longest), longest)


def runs(plan: Plan, question: Question) -> bool:
    """Whether the question's backend executes the plan, its profile prices it and it is wanted at all."""
    return not question.unwanted(plan) and not question.unsupported(plan) and unpriced(plan, question.shape) is None


def regrouped(family: Family) -> Iterator[Family]:
    """The family with every size of quantization groups, and also in chunks where its eviction allows them."""
    yield from _with_groups(family)
    if allows_chunks(family.template):
        evicting = replace(family.template.eviction, chunk=PREFILL_CHUNK_TOKENS)
        template = replace(family.template, eviction=evicting)
        yield from _with_groups(replace(family, name=describe(template), template=template))


def _with_groups(family: Family) -> Iterator[Family]:
    template = family.template
    quantized = template.weights.target_bits != 16 or template.weights.draft_differs
    weights = replace(template.weights, group=max(QUANTIZATION_GROUPS)) if quantized else template.weights
    for group in QUANTIZATION_GROUPS if template.kv.format.quantized else (template.kv.group,):
        yield replace(family, template=replace(template, weights=weights, kv=replace(template.kv, group=group)))


class NothingFits(ValueError):
    """No executable plan of the allowed quality fits into memory. fixes: what would make one fit."""

    def __init__(self, message: str, fixes: Sequence[Fix] = ()) -> None:
        super().__init__(message)
        self.fixes = tuple(fixes)


def tightest(question: Question) -> list[Candidate]:
    """The plans that run and fit with any size of quantization groups, where the usual ones do not fit."""
    regrouped = runnable_families(question, regroup=True)
    fitting = _capacity(question, smallest_plans(regrouped)).fits()
    searched = tuple(family for family, fits in zip(regrouped, fitting, strict=True) if fits)
    found = search(question, searched) if searched else []
    return [one for one in found if one.rejection(question) is None]


def why_nothing_fits(question: Question, memory_utilization: float) -> NothingFits:
    """The error, one line: the executable plan that needs the least memory, and what would make one fit."""
    plans, workload = _least_plans(question), question.workload
    capacity = _capacity(question, plans)
    least, limit = capacity.least(), size_text(question.memory_limit_bytes)
    needs = (
        f"nothing fits: {workload.model} at context {workload.context}, batch {workload.batch} needs at least "
        f"{size_text(capacity.peaks()[least])} ({preset_name(plans[least])}) of {limit} on {workload.hardware}"
    )
    fixes = [*_fixes(question, plans, memory_utilization), *_more_of_the_host(question)]
    options = [one.text for one in fixes]
    if not any("gpu" in one.changes for one in fixes):
        options.append("no GPU of the catalog")
    return NothingFits(f"{needs}; allowed: {', or '.join(options)}", fixes)


def on_device(question: Question, memory_utilization: float) -> tuple[Fix, ...]:
    """What would make a plan fit the device alone, where none does without layers on the host."""
    alone = replace(question, offload=False)
    return tuple(_fixes(alone, _least_plans(alone), memory_utilization))


def smallest_gpu(question: Question, plans: Sequence[Plan], memory_utilization: float) -> Hardware | None:
    """The GPU of the catalog with the least memory on which any of the plans fits; None if none is enough."""

    @cache
    def capacity(element_bytes: int) -> Capacity:
        like = replace(question.machine, element_bytes=element_bytes)
        return Capacity(plans, question.shape, like, question.host_limit_bytes)

    for hardware in sorted(list_hardware(), key=lambda one: one.memory_bytes):
        usable = usable_bytes(hardware.memory_bytes, memory_utilization)
        device = Device(memory_bytes=usable, element_bytes=hardware.element_bytes, num_sms=hardware.num_sms)
        if capacity(hardware.element_bytes).fits(device=device).any():
            return hardware
    return None


def _capacity(question: Question, plans: Sequence[Plan]) -> Capacity:
    return Capacity(plans, question.shape, question.machine, question.host_limit_bytes)


def _least_plans(question: Question) -> list[Plan]:
    return smallest_plans(runnable_families(question, regroup=True))


def _fixes(question: Question, plans: Sequence[Plan], memory_utilization: float) -> Iterator[Fix]:
    workload, capacity = question.workload, _capacity(question, plans)
    longest, batch = _longest(question, capacity), int(capacity.largest_batches().max())
    sizes = []  # with how much less than asked for they are
    if longest:
        found = Fix({"context": longest}, described_contexts(longest, workload, workload.batch))
        sizes.append((workload.context / longest, found))
    if batch:
        found = Fix({"batch": batch}, f"batch up to {batch} with context {workload.context}")
        sizes.append((workload.batch / batch, found))
    yield from (fix for _, fix in sorted(sizes, key=itemgetter(0)))
    if not sizes and workload.batch > 1:
        yield from _alone(question)
    yield from _without_limit(question, capacity, memory_utilization)
    yield from _lower_quality(question)
    gpu = smallest_gpu(question, plans, memory_utilization)
    if gpu:
        changes = {"gpu": gpu.name, "memory_limit": None}
        yield Fix(changes, f"a GPU such as {gpu.name} ({size_text(gpu.memory_bytes)})")


def _without_limit(question: Question, capacity: Capacity, memory_utilization: float) -> Iterator[Fix]:
    """All that the machine's memory allows, where a plan fits that and a lower limit was asked for."""
    usable = usable_bytes(question.profile.hardware.memory_bytes, memory_utilization)
    if capacity.fits(device=replace(question.machine, memory_bytes=usable)).any():
        yield Fix({"memory_limit": None}, f"no memory limit, as {size_text(usable)} may be used")


def _lower_quality(question: Question) -> Iterator[Fix]:
    """The strictest quality at which a plan fits."""
    for quality in Quality:
        if question.quality.allows(quality):
            continue
        plans = _least_plans(replace(question, quality=quality))
        capacity = _capacity(question, plans)
        if capacity.fits().any():
            least = preset_name(plans[capacity.least()])
            yield Fix({"quality": str(quality)}, f"quality {quality}, such as {least}")
            return


def _more_of_the_host(question: Question) -> Iterator[Fix]:
    """The least memory of the host with which a plan fits that leaves layers there."""
    roomy = replace(question, host_limit_bytes=math.inf)
    needed = min((one.host_bytes for one in tightest(roomy)), default=0.0) if question.offload else 0.0
    if needed:
        yield Fix(
            {"host_memory": f"{math.ceil(needed / GB)}GB"}, f"{size_text(needed)} of the host's memory for layers"
        )


def _longest(question: Question, capacity: Capacity) -> int:
    return int(capacity.largest_contexts(context_limits(capacity.plans, question)).max())


def _alone(question: Question) -> Iterator[Fix]:
    """The contexts that fit a batch of 1."""
    one = replace(question, workload=replace(question.workload, batch=1))
    longest = _longest(one, _capacity(one, _least_plans(one)))
    if longest:
        yield Fix({"context": longest, "batch": 1}, described_contexts(longest, one.workload, 1))
