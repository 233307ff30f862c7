"""Host time to launch a forward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ridgeplan.roofline.catalog.profile import Profile
from ridgeplan.roofline.catalog.shapes import ModelShape
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.passes import PassTerms, decode_pass
from ridgeplan.roofline.term_math import indicator
from ridgeplan.runtime.model.prefill import prefill
from ridgeplan.validate.random_decoder import RandomDecoder
from ridgeplan.validate.timing import Bench, Trial, captured

CONTEXT = 64
HOST_CALLS = 20


def with_dispatch(bench: Bench, profile: Profile, shape: ModelShape, layer_counts: tuple[int, ...]) -> Profile:
    """`profile` with dispatch times, measured on steps of decoders with layers of `shape`.

    On an asynchronous device, a captured step is one launch, but prefill is launched kernel by kernel, so a short
    prompt takes the host's time. On a CPU, launches are included in the kernels' rates, and the rest of a step's time
    is the host's other work, in prefill as in decoding. There the layers must be as large as a real model's, so that
    the caches are cold between operations.
    """
    models = [RandomDecoder.build(bench, replace(shape, layers=layers), CONTEXT, 1) for layers in layer_counts]
    if profile.asynchronous:
        pass_s, layer_s = _line(layer_counts, [_host_seconds(model) for model in models])
        _, prefill_layer_s = _line(layer_counts, [_prefill_seconds(model) for model in models])
    else:
        kernels = Machine.of(replace(profile, pass_dispatch_s=0.0, layer_dispatch_s=0.0))
        pass_s, layer_s = _line(layer_counts, [_unexplained_seconds(model, kernels) for model in models])
        prefill_layer_s = layer_s
    return replace(profile, pass_dispatch_s=pass_s, layer_dispatch_s=layer_s, prefill_layer_dispatch_s=prefill_layer_s)


def _line(layer_counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of a pass and of each layer, neither below 0."""
    layer_s, pass_s = np.polyfit(layer_counts, seconds, 1)
    return max(0.0, float(pass_s)), max(0.0, float(layer_s))


def _prefill_seconds(model: RandomDecoder) -> float:
    """Seconds of a prefill so short that launching its kernels dominates."""
    weights, prompt = model.weights(), model.tokens(CONTEXT)[0]
    times = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        prefill(model.decoder, weights, model.cache, 0, prompt)
        torch.cuda.synchronize(model.bench.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _unexplained_seconds(model: RandomDecoder, kernels: Machine) -> float:
    trial = _step_trial(model)
    return model.bench.seconds(trial) - _kernel_seconds(model, kernels)


def _host_seconds(model: RandomDecoder) -> float:
    """The host's time to launch one captured step, while the device executes earlier ones."""
    trial = _step_trial(model)
    trial.call(0)
    graph = captured(lambda: trial.call(0))
    torch.cuda.synchronize(model.bench.device)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        graph.replay()
    seconds = (time.perf_counter() - start) / HOST_CALLS
    torch.cuda.synchronize(model.bench.device)
    return seconds


def _kernel_seconds(model: RandomDecoder, kernels: Machine) -> float:
    """Predicted seconds of the kernels of one step."""
    terms = PassTerms(
        batch=1,
        queries=1,
        quantized_tokens=0,
        full_tokens=CONTEXT,
        bits=0,
        group=1,
        splits=1,
        weight_bytes=kernels.element_bytes,
        head_bytes=kernels.element_bytes,
        element_bytes=kernels.element_bytes,
        fused_swiglu=indicator(1, kernels.fused_swiglu_rows),
    )
    return float(sum(kernels.op_seconds(op, {}) for op in decode_pass(model.shape, terms)))


def _step_trial(model: RandomDecoder) -> Trial:
    """One decode step at the end of the context."""
    weights, tokens, cache = model.weights(), model.tokens(1), model.cache
    cache.lengths.fill_(CONTEXT - 1)
    return Trial(
        "dispatch",
        f"{model.shape.layers} layers",
        Cost(),
        lambda _: model.decoder.step(weights, cache, tokens, cache.target_metadata(1)),
    )
