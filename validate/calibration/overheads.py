"""Overheads of a pass beyond its kernels: launches by the host, and gaps between kernels on a GPU.

In a chain of one kernel, each call starts while the last one ends, and finds its code and parameters cached. Between
the different kernels of a pass that works less well; and a round has small operations that no class covers: positions
and slots, random numbers, the check that logits are finite, the results that the host reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from scipy.optimize import nnls

from ridgeplan.planner.prediction import predict
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.catalog.profile import Profile, Rates, RowStep
from ridgeplan.roofline.cost import Cost, indicator
from ridgeplan.roofline.execution import CUDA_LIBRARY_GEMM_ROWS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.validate.calibration.fit import RoundSample
from ridgeplan.validate.calibration.scales import fitted_scales, round_plan, with_scales
from ridgeplan.validate.random_model import RandomDecoder, RandomModel, measured_round, random_cache
from ridgeplan.validate.timing import Bench, KernelCall, captured

CONTEXT = 64
PROMPT = 2 * CUDA_LIBRARY_GEMM_ROWS  # tokens whose products are the library's, as in all but the shortest prompts
HOST_CALLS = 20
DISPATCH_TIMES = ("pass_dispatch_s", "layer_dispatch_s", "prefill_layer_dispatch_s")  # of a profile
STEP_PASSES = 8  # over the decoders on a CPU: a step is many times longer than a kernel, so few are undisturbed


def with_dispatch(bench: Bench, profile: Profile, shape: ModelShape, layer_counts: tuple[int, ...]) -> Profile:
    """`profile` with dispatch times, measured on steps of decoders with layers of `shape`.

    On an asynchronous device, a captured step is one launch, but prefill is launched kernel by kernel, so a short
    prompt takes the host's time. On a CPU, launches are included in the kernels' rates, and the rest of a step's time
    is the host's other work, in prefill as in decoding. There the layers must be as large as a real model's, so that
    the caches are cold between operations. The fastest of several passes over the decoders counts, as for kernels.
    """
    room = PROMPT if profile.asynchronous else CONTEXT
    models = [RandomDecoder.build(bench, replace(shape, layers=layers), room, 1) for layers in layer_counts]
    if profile.asynchronous:
        pass_s, layer_s = _line(layer_counts, [_host_seconds(model) for model in models])
        _, prefill_layer_s = _line(layer_counts, [_prefill_seconds(model) for model in models])
    else:
        kernels = Machine.of(replace(profile, pass_dispatch_s=0.0, layer_dispatch_s=0.0))
        passes = [[model.bench.seconds(_step_call(model)) for model in models] for _ in range(STEP_PASSES)]
        fastest = map(min, zip(*passes, strict=True))
        unexplained = [step_s - _kernel_seconds(model, kernels) for model, step_s in zip(models, fastest, strict=True)]
        pass_s, layer_s = _line(layer_counts, unexplained)
        prefill_layer_s = layer_s
    return replace(profile, pass_dispatch_s=pass_s, layer_dispatch_s=layer_s, prefill_layer_dispatch_s=prefill_layer_s)


def _line(layer_counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of a pass and of each layer, neither below 0."""
    layer_s, pass_s = np.polyfit(layer_counts, seconds, 1)
    return max(0.0, float(pass_s)), max(0.0, float(layer_s))


def _prefill_seconds(model: RandomDecoder) -> float:
    """Seconds of a prefill so short that launching its kernels dominates."""
    weights, prompt = model.weights(), model.tokens(PROMPT)[0]
    times = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        prefill(model.decoder, weights, model.cache, 0, prompt)
        torch.cuda.synchronize(model.bench.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _host_seconds(model: RandomDecoder) -> float:
    """The host's time to launch one captured step, while the device executes earlier ones."""
    call = _step_call(model)
    call.run(0)
    graph = captured(lambda: call.run(0))
    torch.cuda.synchronize(model.bench.device)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        graph.replay()
    seconds = (time.perf_counter() - start) / HOST_CALLS
    torch.cuda.synchronize(model.bench.device)
    return seconds


def _kernel_seconds(model: RandomDecoder, kernels: Machine) -> float:
    """Predicted seconds of the kernels of one step."""
    fused = indicator(1, kernels.fused_swiglu_rows)
    terms = PassTerms.plain(1, CONTEXT, kernels.element_bytes, fused_swiglu=fused)
    return float(sum(kernels.op_seconds(op, {}) for op in decode_pass(model.shape, terms)))


def _step_call(model: RandomDecoder) -> KernelCall:
    """One decode step at the end of the context."""
    weights, tokens, cache = model.weights(), model.tokens(1), model.cache
    cache.lengths.fill_(CONTEXT - 1)
    return KernelCall(
        "dispatch",
        f"{model.shape.layers} layers",
        Cost(),
        lambda _: model.decoder.step(weights, cache, tokens, AttentionMetadataBuilder(cache).target_metadata(1)),
    )


WORKLOADS = ((1800, 1), (7000, 3), (1800, 11))  # context, batch
PRESETS = ("autoregressive", "quantspec")
NEW_TOKENS = 256  # more than the timed rounds add
CPU_WORKLOADS = ((512, 1), (1024, 1))
CPU_PRESETS = ("autoregressive", "int8", "quantspec", "quantspec-int8")
GAP_STEPS = (4, 8, 16)  # rows above which gaps may be longer: kernels of libraries start later than this package's


@dataclass(frozen=True)
class Unexplained:
    """Measured minus predicted seconds of a draft step, a target step and the rest of a round, of a model."""

    layers: int
    batch: int
    queries: int  # of the target's pass
    draft_s: float | None  # None without drafts
    target_s: float
    round_s: float

    @classmethod
    def of(cls, measured: RoundSample, shape: ModelShape, profile: Profile) -> Unexplained:
        """Of a measured round of a model."""
        plan = round_plan(measured, shape, profile)
        predicted = predict(plan, shape, profile)
        draft_s = measured.draft_s - 1e-3 * predicted.draft_step_ms if plan.speculation.gamma else None
        target_s = measured.target_s - 1e-3 * predicted.target_step_ms
        sizes = shape.layers, measured.batch, plan.speculation.gamma + 1
        return cls(*sizes, draft_s, target_s, measured.rest_s)


def measured_rounds(profile: Profile, shapes: Sequence[ModelShape], device: torch.device) -> Iterator[RoundSample]:
    """Rounds of models of `shapes` on this machine, as they are measured."""
    return (sample for index, shape in enumerate(shapes) for sample in _rounds(index, shape, profile, device))


def with_rounds(profile: Profile, shapes: Sequence[ModelShape], rounds: Sequence[RoundSample]) -> Profile:
    """`profile` with what whole rounds take beyond its kernels: on a GPU gaps, on a CPU scales of the classes."""
    if not rounds:
        return profile
    if profile.asynchronous:
        return with_fitted_gaps(profile, shapes, rounds)
    return with_scales(profile, fitted_scales(profile, shapes, rounds))


def with_fitted_gaps(profile: Profile, shapes: Sequence[ModelShape], rounds: Sequence[RoundSample]) -> Profile:
    """`profile` with the gaps of whole rounds on models of `shapes`, which must differ in layers."""
    kernels = {kind: rates for kind, rates in profile.classes.items() if kind != "gap"}
    profile = replace(profile, classes=kernels, draft_gap_s=0.0, target_gap_s=0.0, round_s=0.0)
    unexplained = [Unexplained.of(sample, shapes[sample.model], profile) for sample in rounds]
    fitted = fit_gaps(unexplained)
    round_s = float(np.median([item.round_s for item in unexplained]))
    classes = {**profile.classes, "gap": fitted.layer}
    return replace(profile, classes=classes, draft_gap_s=fitted.draft_s, target_gap_s=fitted.target_s, round_s=round_s)


@dataclass(frozen=True)
class Gaps:
    """Overheads of a draft pass, of a target pass, and of each layer beyond its kernels."""

    draft_s: float
    target_s: float
    layer: Rates


def fit_gaps(unexplained: Sequence[Unexplained]) -> Gaps:
    """Least squares; a layer's gap grows in steps of rows, and nothing is negative."""
    rows = [(item, 0.0, item.batch * item.queries, item.target_s) for item in unexplained]
    rows += [(item, 1.0, item.batch, item.draft_s) for item in unexplained if item.draft_s is not None]
    table = [
        (drafting, 1 - drafting, item.layers, *(item.layers * (count > above) for above in GAP_STEPS))
        for item, drafting, count, _ in rows
    ]
    (draft_s, target_s, first, *more), _ = nnls(np.array(table, float), np.array([seconds for *_, seconds in rows]))
    steps = [RowStep(above, float(extra)) for above, extra in zip(GAP_STEPS, more, strict=True) if extra]
    layer = Rates(1.0, 1.0, float(first), 0.0, steps=tuple(steps))
    return Gaps(float(draft_s), float(target_s), layer)


def _rounds(index: int, shape: ModelShape, profile: Profile, device: torch.device) -> Iterator[RoundSample]:
    model, cuda = RandomModel.build(shape, device, Machine.of(profile)), profile.asynchronous
    for (context, batch), name in product(WORKLOADS, PRESETS) if cuda else product(CPU_WORKLOADS, CPU_PRESETS):
        sample = RoundSample(index, name, context, batch, NEW_TOKENS, 0.0, 0.0, 0.0)
        plan = round_plan(sample, shape, profile)
        times = measured_round(model, plan, steady=cuda)
        yield replace(
            sample, tokens=times.grown, draft_s=times.draft_s, target_s=times.verify_s,
            rest_s=times.keep_s + times.idle_s, prefill_s=0.0 if cuda else _prompt_seconds(model, plan),
        )  # fmt: skip


def _prompt_seconds(model: RandomModel, plan: Plan) -> float:
    """Seconds of a prompt of the plan's context."""
    prompt = torch.randint(model.shape.vocab, (plan.workload.context,), device=model.device)
    cache, target = random_cache(model, plan), model.target(plan)
    start = time.perf_counter()
    prefill(model.decoder, target, cache, 0, prompt)
    return time.perf_counter() - start
