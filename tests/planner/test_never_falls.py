"""Times and memory never fall when work grows, at the rates of calibrated machines and of others."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile_lookup import profile_for, shipped_profiles
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.policies.base import unpriced
from ridgeplan.roofline.plan.presets import PRESETS, preset

MODELS = ("Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-30B-A3B", "DeepSeek-V3", "gemma-3-12b-it")
BATCHES = np.arange(1.0, 300.0)
CONTEXTS = np.unique(np.geomspace(16, 1 << 20, 400).round())
GAMMAS = np.arange(1.0, 16.0)
ROUNDING = 1 - 1e-9
# Presets that draft, for every model that they are priced for.
DRAFTING = [
    (name, model)
    for name in PRESETS
    for model in MODELS
    if name.startswith(("quantspec", "magicdec"))
    and unpriced(preset(name, Workload(model, "h200", 8192)), load_shape(model)) is None
]


def estimates(name: str, model: str, gpu: str, **varying: np.ndarray) -> Estimate:
    """A preset with arrays in place of some of its strategy's fields, everything on the device."""
    shape, machine = load_shape(model), Machine.of(profile_for(load_hardware(gpu), shipped_profiles()))
    machine = replace(machine, memory_bytes=1e15)
    plan = preset(name, Workload(model, gpu, 8192, 64, 3))
    strategy = strategy_of(plan, shape, machine, 0.9).with_terms(**varying)
    return evaluate(shape, machine, strategy, rates_of(plan, shape, machine))


def rises(values: np.ndarray) -> bool:
    """Whether no value is below the one before it."""
    return bool((values[1:] >= values[:-1] * ROUNDING).all())


@pytest.mark.parametrize("gpu", ["h200", "h100", "a100", "rtx4090"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "int4-weights"])
def test_more_sequences_take_more_time_and_memory(name: str, model: str, gpu: str) -> None:
    found = estimates(name, model, gpu, batch=BATCHES)
    for values in (found.round.draft_s, found.round.verify_s, found.round.total_s, found.ttft_s, found.memory.peak):
        assert rises(np.broadcast_to(values, BATCHES.shape))


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "magicdec-streaming"])
def test_longer_contexts_take_more_time(name: str, model: str, gpu: str) -> None:
    found = estimates(name, model, gpu, context=CONTEXTS)
    for values in (found.round.draft_s, found.round.verify_s, found.round.total_s, found.ttft_s, found.memory.kv):
        assert rises(np.broadcast_to(values, CONTEXTS.shape))


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(("name", "model"), DRAFTING)
def test_more_drafts_take_more_time_a_round(name: str, model: str, gpu: str) -> None:
    found = estimates(name, model, gpu, gamma=GAMMAS)
    for values in (found.round.verify_s, found.round.total_s, found.memory.decode_peak):
        assert rises(np.broadcast_to(values, GAMMAS.shape))
