"""Feasibility: which plans fit and run, why none does, and which changes to the question would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from ridgeplan.planner.capacity import Capacity, described_batches, described_contexts, usable_bytes
from ridgeplan.planner.parallelism import divided
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.quantities import GB, size_text, tokens_text
from ridgeplan.planner.question import Question, executed_by_engine
from ridgeplan.planner.recommendation import READING_TPOT_MS, Fix
from ridgeplan.planner.resolution import longest_context
from ridgeplan.planner.search import Candidate, Family, named_plan, question_families, search
from ridgeplan.roofline.catalog.gguf import as_q4_k_m
from ridgeplan.roofline.catalog.hardware import Hardware, list_hardware
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.execution import PREFILL_CHUNK_TOKENS, QUANTIZATION_GROUPS
from ridgeplan.roofline.plan.plan import Plan, PlanError
from ridgeplan.roofline.plan.presets import autoregressive, describe, preset_name
from ridgeplan.roofline.plan.support import Backend, allows_chunks, exceeds_window, missing_cost_model

GPU_COUNTS = (2, 4, 8, 16)  # that are tried where one GPU is not enough


class NothingFits(ValueError):
    """No plan that runs and that the options allow fits into memory. fixes: changes with which one would."""

    def __init__(self, message: str, fixes: Sequence[Fix] = ()) -> None:
        super().__init__(message)
        self.fixes = tuple(fixes)


def is_executable(plan: Plan, question: Question) -> bool:
    """Whether the options allow the plan, the backend executes it, and the cost model covers it."""
    return not (
        question.constraint_violation(plan) or question.unsupported(plan) or missing_cost_model(plan, question.shape)
    )


def executable_families(question: Question, *, regroup: bool = False) -> list[Family]:
    """Families that run and that the options allow; with `regroup`, each as `regrouped` varies it.

    Raises NothingFits if the options rule out every family.
    """
    allowed = _executable_families(question)
    if not allowed:
        raise _contradiction(question)
    if not regroup:
        return allowed
    variants = (variant for family in allowed for variant in regrouped(family))
    return [variant for variant in variants if is_executable(variant.template, question)]


def _executable_families(question: Question) -> list[Family]:
    known = question_families(question, question.options.offload)
    return [family for family in known if is_executable(family.template, question)]


def _contradiction(question: Question) -> NothingFits:
    """The error for a KV format that no plan of the quality and backend has."""
    options = question.options
    if options.backend is Backend.VLLM_PLUGIN and (reason := question.unsupported(autoregressive(question.workload))):
        fixes = list(_without_plugin(question))
        allowed = (
            f"; allowed: {', or '.join(fix.text for fix in fixes)}"
            if fixes
            else f", and nothing fits vLLM on {question.workload.hardware}"
        )
        return NothingFits(f"{question.shape.name}: {reason}{allowed}", fixes)
    others = _executable_families(question.with_options(kv_format=None))
    formats = dict.fromkeys(str(family.template.kv.format) for family in others)
    qualities = (quality for quality in Quality if _executable_families(question.with_options(quality=quality)))
    changes = [{"kv_format": name} for name in formats]
    changes += [{"quality": str(quality)} for quality in islice(qualities, 1)]
    fixes = [fix for change in changes for fix in islice(_with_what_fits(question, change), 1)]
    executed = "" if options.backend is Backend.ANY else f" that {options.backend} executes"
    missing = f"no plan of quality {options.quality}{executed} has KV format {options.kv_format}"
    if not fixes:
        return NothingFits(f"{missing}, and with {', '.join(formats)} nothing fits {question.workload.hardware}")
    return NothingFits(f"{missing}; allowed: {', or '.join(fix.text for fix in fixes)}", fixes)


def _without_plugin(question: Question) -> Iterator[Fix]:
    """vLLM itself, with whatever else it needs to fit."""
    changes: dict[str, Any] = {"backend": "vllm"}
    if _executable_families(question.with_options(**changes)):
        return _with_what_fits(question, changes, "backend vllm")
    return _with_what_fits(question, {**changes, "kv_format": None}, "backend vllm with another KV format")


def _with_what_fits(question: Question, changes: Mapping[str, Any], text: str = "") -> Iterator[Fix]:
    """Changes of options, with whatever else the question then needs to fit. text: them in words."""
    changed = question.with_options(**changes)
    text = text or " and ".join(f"{name.replace('kv_format', 'KV format')} {value}" for name, value in changes.items())
    if _any_fits(changed):
        return iter([Fix(changes, text)])
    return (Fix({**changes, **fix.changes}, f"{text} and {fix.text}") for fix in on_device(changed))


def regrouped(family: Family) -> Iterator[Family]:
    """The family with every size of quantization groups; evictions also with prompts that go through in chunks.

    Larger groups have fewer scales, smaller ones a smaller buffer in full precision; chunks have a smaller workspace.
    They are only searched if the usual sizes do not fit.
    """
    yield from _with_groups(family)
    if allows_chunks(family.template):
        eviction = replace(family.template.eviction, chunk=PREFILL_CHUNK_TOKENS)
        template = replace(family.template, eviction=eviction)
        yield from _with_groups(replace(family, name=describe(template), template=template))


def _with_groups(family: Family) -> Iterator[Family]:
    template = family.template
    quantized = template.weights.target_bits != 16 or template.weights.draft_differs
    weights = replace(template.weights, group=max(QUANTIZATION_GROUPS)) if quantized else template.weights
    for group in QUANTIZATION_GROUPS if template.kv.format.quantized else (template.kv.group,):
        yield replace(family, template=replace(template, weights=weights, kv=replace(template.kv, group=group)))


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


def search_regrouped(question: Question) -> list[Candidate]:
    """The plans that run and fit with any size of quantization groups, if the usual sizes do not fit."""
    variants = executable_families(question, regroup=True)
    fitting = _capacity(question, smallest_plans(variants)).fits()
    searched = tuple(family for family, fits in zip(variants, fitting, strict=True) if fits)
    candidates = search(question, searched) if searched else []
    return [candidate for candidate in candidates if candidate.rejection(question) is None]


def infeasible(question: Question, whole_model: Question | None = None) -> NothingFits:
    """The error, one line: the executable plan that needs the least memory, and what would make one fit.

    whole_model: the question for the whole model with the checkpoint's weights, which engines hold.
    """
    plans, workload = _smallest_executable(question), question.workload
    capacity = _capacity(question, plans)
    smallest, limit = capacity.smallest(), size_text(question.memory_limit_bytes)
    needs = (
        f"nothing fits: {workload.model} at context {tokens_text(workload.context)}, batch {workload.batch} needs "
        f"at least {size_text(capacity.peaks()[smallest])} ({preset_name(plans[smallest])}) of {limit} on "
        f"{workload.hardware}"
    )
    fixes = [*_stored_file(question), *on_device(question, whole_model), *_more_host_memory(question)]
    texts = [fix.text for fix in fixes]
    if not any({"gpu", "gpus"} & fix.changes.keys() for fix in fixes):
        texts.append("a GPU with more memory than any in the catalog")
    return NothingFits(f"{needs}; allowed: {', or '.join(texts)}", fixes)


def _stored_file(question: Question) -> Iterator[Fix]:
    """A GGUF file of the model in 4 bits, where a plan that keeps its weights as they are fits the device alone.

    The user must name that file, so that nothing is changed.
    """
    stored = as_q4_k_m(question.shape)
    if stored and question.engine is None and _any_fits(replace(question, shape=stored).with_options(offload=False)):
        yield Fix({}, "a GGUF file of the model, such as Q4_K_M, whose 4-bit weights stay as they are stored")


def on_device(question: Question, whole_model: Question | None = None) -> tuple[Fix, ...]:
    """What would make a plan fit the device alone, where none does without layers on the host."""
    gpus = fewest_gpus(whole_model or question)
    several = more_gpus(gpus, question.profile.hardware.name) if gpus else None
    return tuple(_fixes(question.with_options(offload=False), several))


def more_gpus(gpus: int, name: str) -> Fix:
    """The question for several GPUs of a kind."""
    return Fix({"gpus": gpus}, f"{gpus} x {name} (`gpus={gpus}`)")


def fewest_gpus(question: Question, preset: str | None = None) -> int | None:
    """The fewest GPUs of the question's kind, more than it names, that hold its size in an engine.

    None where none of `GPU_COUNTS` does. question: of the whole model, which the GPUs share by tensor and pipeline
    parallelism. preset: the only plan that counts.
    """
    options, hardware = question.options, question.profile.hardware
    served = options.backend in (Backend.RIDGEPLAN, Backend.VLLM, Backend.SGLANG)
    if not served or hardware.shares_host_memory:
        return None
    for gpus in GPU_COUNTS:
        if gpus <= options.least_gpus:
            continue
        shared = replace(options, gpus=gpus, data_parallel=options.data_parallel or 1)
        try:
            sharded = divided(replace(question, options=executed_by_engine(shared)))[0].values()
        except PlanError:  # that no degrees divide
            continue
        if any(_any_fits(each, preset) for each in sharded):
            return gpus
    return None


def _any_fits(question: Question, preset: str | None = None) -> bool:
    if preset:
        plans = [plan for plan in (named_plan(preset, question.workload),) if not question.unsupported(plan)]
    else:
        plans = smallest_plans(_executable_families(question))
    return bool(plans) and bool(_capacity(question, plans).fits().any())


def smallest_gpu(question: Question, plans: Sequence[Plan], min_bytes: float = 0) -> Hardware | None:
    """The GPU of the catalog with the least memory on which any of the plans fits; None if none is enough.

    Its memory is about as fast as that of the question's GPU, what runs the plans there runs them on it, too, and no
    CPU shares it unless one does there. min_bytes: the least memory that it may have.
    """
    current = question.profile.hardware

    def replaces(hardware: Hardware) -> bool:
        as_fast = hardware.bandwidth_bytes_per_s >= MIN_BANDWIDTH_SHARE * current.bandwidth_bytes_per_s
        runs = question.engine is not None or hardware.is_amd <= current.is_amd
        return as_fast and runs and hardware.unified_memory <= current.unified_memory

    for hardware in sorted(list_hardware(), key=lambda hardware: hardware.memory_bytes):
        if hardware.memory_bytes >= min_bytes and replaces(hardware):
            usable = usable_bytes(hardware.memory_bytes, question.options.memory_utilization)
            profile = profile_for(hardware, shipped_profiles())
            if _capacity(replace(question, profile=profile, memory_limit_bytes=usable), plans).fits().any():
                return hardware
    return None


def _capacity(question: Question, plans: Sequence[Plan]) -> Capacity:
    return Capacity(plans, question.shape, question.machine, question.host_limit_bytes)


def _smallest_executable(question: Question) -> list[Plan]:
    return smallest_plans(executable_families(question, regroup=True))


MIN_BANDWIDTH_SHARE = 0.75  # of the question's GPU, which another GPU needs to take its place
SAME_CLASS = 1.15  # a GPU with less than this times the memory is of the same size class
NEAR_SIZE = 4.0  # a context that is smaller by more than this is of no use
MIN_CONTEXT = 1024  # tokens, of which fewer are of no use
SHARES_OF_NEW_TOKENS = (2, 4)  # that are tried
HIGH_UTILIZATION = 0.95  # of the memory, which a GPU without other processes allows


def _fixes(question: Question, several: Fix | None) -> Iterator[Fix]:
    """Changes with which a plan fits the device alone, or `several` of it.

    In the order of what they give up: 8-bit formats, new tokens, 4-bit formats, memory for others, the batch, this GPU,
    context, and last, unless exact plans are wanted, dropped tokens.
    """
    plans = _smallest_executable(question)
    capacity = _capacity(question, plans)
    quality, more_memory = _lower_quality(question), _more_memory(question, capacity)
    batches, contexts = _largest_batch(question, capacity), _nearest_context(question, capacity)
    step = quality.changes["quality"] if quality else Quality.LOSSY

    if quality and step in (Quality.EXACT, Quality.NEAR_LOSSLESS):
        yield quality
    yield from _fewer_new_tokens(question)
    if quality and step == Quality.FOUR_BIT:
        yield quality
    yield from more_memory
    yield from batches
    if step == Quality.LOSSY:
        yield from _fewer_bits_and_smaller(question, [*batches, *contexts])
    if several is not None:
        yield several
    if not any("memory_limit" in fix.changes for fix in more_memory):
        gpu = smallest_gpu(question, plans, SAME_CLASS * question.profile.hardware.memory_bytes)
        if gpu:
            changes = {"gpu": gpu.name, "memory_limit": None}
            yield Fix(changes, f"a GPU such as {gpu.name} ({size_text(gpu.memory_bytes)})")
    yield from contexts
    if not batches and not contexts and question.workload.batch > 1:
        single = replace(question, workload=replace(question.workload, batch=1))
        for fix in _nearest_context(single, _capacity(single, _smallest_executable(single))):
            yield Fix({**fix.changes, "batch": 1}, fix.text)
    if quality and step == Quality.LOSSY:
        yield quality


def _largest_batch(question: Question, capacity: Capacity) -> list[Fix]:
    batch = int(capacity.largest_batches().max())
    return [Fix({"batch": batch}, described_batches(batch, question.workload))] if batch else []


def _nearest_context(question: Question, capacity: Capacity) -> list[Fix]:
    """The longest context that fits, if it is of use for prompts of the length that was asked for."""
    workload = question.workload
    longest = int(capacity.largest_contexts(context_limits(capacity.plans, question)).max())
    if longest < max(MIN_CONTEXT, workload.context / NEAR_SIZE):
        return []
    return [Fix({"context": longest}, described_contexts(longest, workload, workload.batch))]


def _looser_steps(question: Question) -> Iterator[Quality]:
    """The steps of quality that admit what the question's does not; for exact plans those that keep every token."""
    wanted = question.options.quality
    for step in Quality:
        admitted = isinstance(wanted, Quality) and wanted.allows(step)
        if not admitted and (wanted, step) != (Quality.EXACT, Quality.LOSSY):
            yield step


def _fewer_bits_and_smaller(question: Question, smaller: Sequence[Fix]) -> Iterator[Fix]:
    """The most bits that with a smaller batch or context fit, where no step that keeps every token is enough alone.

    smaller: the batch and context that fit with the question's bits, if any; fewer bits must allow others.
    """
    for step in _looser_steps(question):
        looser = question.with_options(quality=step)
        capacity = _capacity(looser, _smallest_executable(looser))
        sizes = [*_largest_batch(looser, capacity), *_nearest_context(looser, capacity)]
        if sizes and sizes[0].changes not in [fix.changes for fix in smaller] and step is not Quality.LOSSY:
            yield Fix({"quality": str(step), **sizes[0].changes}, f"quality {step} and {sizes[0].text}")
            return


def _fewer_new_tokens(question: Question) -> Iterator[Fix]:
    """Half or a quarter of the new tokens, if that is enough."""
    for divisor in SHARES_OF_NEW_TOKENS:
        tokens = question.workload.new_tokens // divisor
        if not tokens:
            return
        smaller = replace(question, workload=replace(question.workload, new_tokens=tokens))
        if _capacity(smaller, _smallest_executable(smaller)).fits().any():
            yield Fix({"new_tokens": tokens}, f"{tokens} new tokens")
            return


def _more_memory(question: Question, capacity: Capacity) -> list[Fix]:
    """No memory limit if one was asked for, or else a higher utilization, if a plan fits that."""
    memory_bytes, utilization = question.profile.hardware.memory_bytes, question.options.memory_utilization
    limited = question.options.memory_limit is not None
    usable = usable_bytes(memory_bytes, utilization if limited else max(utilization, HIGH_UTILIZATION))
    if not capacity.fits(device=replace(question.machine, memory_bytes=usable)).any():
        return []
    if limited:
        return [Fix({"memory_limit": None}, f"no memory limit, as {size_text(usable)} may be used")]
    return [Fix({"memory_utilization": HIGH_UTILIZATION}, f"memory utilization {HIGH_UTILIZATION}")]


def _lower_quality(question: Question) -> Fix | None:
    """The strictest quality at which a plan fits."""
    for step in _looser_steps(question):
        plans = _smallest_executable(question.with_options(quality=step))
        capacity = _capacity(question, plans)
        if capacity.fits().any():
            smallest = preset_name(plans[capacity.smallest()])
            return Fix({"quality": str(step)}, f"quality {step}, such as {smallest}")
    return None


def _more_host_memory(question: Question) -> Iterator[Fix]:
    """The least memory of the host with which a plan that keeps layers there fits and is as fast as reading."""
    if not question.options.offload:
        return
    candidates = search_regrouped(replace(question, host_limit_bytes=math.inf))
    usable = [candidate for candidate in candidates if 1e3 * candidate.tpot_s <= READING_TPOT_MS]
    needed = min((candidate.host_bytes for candidate in usable), default=0.0)
    if needed:
        yield Fix(
            {"host_memory": f"{math.ceil(needed / GB)}GB"}, f"{size_text(needed)} of the host's memory for layers"
        )
