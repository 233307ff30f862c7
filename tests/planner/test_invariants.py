"""The best plan over a grid of models, GPUs, contexts, batches and memory: no inversion, nothing over the limit, and
"nothing fits" only where nothing does.

Acceptance is held at that of one context: it is a fact of models and texts, and may rise with the context.
"""

import math
import os
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.feasibility import executable_families, search_regrouped
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.prediction import predict_all
from ridgeplan.planner.quality import Quality, quality_of
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.search import search
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.evaluate import Estimate, evaluate
from ridgeplan.roofline.execution import PADDED_PROMPT_TOKENS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Placement, Workload
from ridgeplan.roofline.plan.policy import KV_BUDGET
from ridgeplan.roofline.plan.presets import PRESETS, preset
from ridgeplan.roofline.plan.support import missing_cost_model, missing_execution

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B",
)  # fmt: skip
GPUS = ("rtx4060-laptop", "rtx4090", "l40s", "a6000", "a100-80gb", "h100-sxm", "h200", "b200")
CONTEXTS = tuple(512 << power for power in range(12))  # 512 to 1M
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.9, 0.6, 0.3)  # of the memory
MACHINES = tuple(product(MODELS, GPUS))
# Four minutes on two cores; else every model on two GPUs, and every GPU with two or three models.
WHOLE = "RIDGEPLAN_WHOLE_GRID" in os.environ
CHECKED = [machine for index, machine in enumerate(MACHINES) if WHOLE or (index + index // len(GPUS)) % 4 == 0]
SAMPLED = MACHINES[5::27]  # one of every 27, which meets 3 models and 3 GPUs
REFERENCE_CONTEXT = 16384


@pytest.fixture
def one_acceptance(monkeypatch):
    original = AcceptanceModel.for_model

    @cache
    def of_model(name):
        return original(load_shape(name), REFERENCE_CONTEXT)

    monkeypatch.setattr(AcceptanceModel, "for_model", lambda shape, *acceptance: of_model(shape.name))


@cache
def question_of(model, gpu):
    return ask(model, gpu, 1, quality="lossy")


def question_at(model, gpu, context, batch, share, quality=Quality.LOSSY):
    first = question_of(model, gpu)
    workload = planner.workload_for(first.shape, first.profile, context, 1024, batch, yarn=True)
    limit = share * first.profile.hardware.memory_bytes
    return replace(first, workload=workload, memory_limit_bytes=limit).with_options(quality=quality)


def best_score(question: Question) -> float:
    """Seconds per token of the fastest plan that runs; infinite where none fits."""
    allowed = [
        candidate
        for candidate in search(question, tuple(executable_families(question)))
        if candidate.rejection(question) is None
    ]
    assert all(candidate.peak_bytes <= question.memory_limit_bytes for candidate in allowed)
    return min((candidate.score for candidate in allowed), default=math.inf)


Size = tuple[int, int, float]  # context, batch, share of the memory


def best_scores(model, gpu, axes, quality) -> dict[Size, float]:
    """`best_score` of every size of a grid that YaRN reaches."""
    sizes = [size for size in product(*axes) if size[0] <= 64 * load_shape(model).max_context - 1024]
    return {size: best_score(question_at(model, gpu, *size, quality)) for size in sizes}


def inversions(best: dict[Size, float], axes):
    """Neighbours of the grid of which the larger, or the one with less memory, is faster."""
    for index, axis in enumerate(axes):
        for size, (value, following) in product(best, pairwise(axis)):
            harder = (*size[:index], following, *size[index + 1 :])
            if size[index] == value and harder in best and best[harder] < best[size] * (1 - 1e-9):
                yield size, harder, best[size], best[harder]


@pytest.mark.usefixtures("one_acceptance")
@pytest.mark.parametrize(("model", "gpu"), SAMPLED)
def test_a_sample_of_the_grid_has_no_inversion(model, gpu):
    axes = CONTEXTS[::2], BATCHES[::3], SHARES
    assert list(inversions(best_scores(model, gpu, axes, Quality.LOSSY), axes)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("one_acceptance")
@pytest.mark.parametrize(("model", "gpu"), CHECKED)
def test_the_grid_has_no_inversion_and_no_refusal_that_a_preset_contradicts(model, gpu):
    axes, quality = (CONTEXTS, BATCHES, SHARES), Quality.NEAR_LOSSLESS
    best = best_scores(model, gpu, axes, quality)
    assert list(inversions(best, axes)) == []
    refused = [size for size, score in best.items() if score == math.inf]
    assert [size for size in refused if contradicted(question_at(model, gpu, *size, quality))] == []


def a_preset_fits(question: Question) -> bool:
    """Of all presets that run and are allowed, with layers on the host where they can be, each priced by itself."""
    plans = [preset(name, question.workload) for name in PRESETS]
    on_host = Placement(True, min(KV_BUDGET, question.workload.context))
    running = [
        plan
        for plan in (*plans, *(replace(plan, placement=on_host) for plan in plans))
        if not missing_execution(plan, question.shape) and question.options.quality.allows(quality_of(plan))
    ]
    machine = replace(Machine.of(question.profile), memory_bytes=question.memory_limit_bytes)
    estimated = predict_all(running, question.shape, question.profile, machine)
    return any(question.oom_reason(item.best.peak_memory_bytes, item.host_bytes) is None for item in estimated)


def contradicted(question: Question) -> bool:
    """Whether a preset that fits is priced where the search finds nothing."""
    return a_preset_fits(question) and not search_regrouped(question)


@pytest.mark.parametrize(
    "quality",
    [Quality.LOSSY, *(pytest.param(quality, marks=pytest.mark.slow) for quality in Quality if quality != "lossy")],
)
@pytest.mark.parametrize(("model", "gpu"), SAMPLED)
def test_nothing_fits_only_where_no_preset_does(model, gpu, quality):
    for size in product(CONTEXTS[::4], BATCHES[::6], SHARES[::2]):
        if size[0] <= 64 * load_shape(model).max_context - 1024:
            assert not contradicted(question_at(model, gpu, *size, quality)), size


@pytest.mark.parametrize(("model", "gpu"), SAMPLED)
def test_recommended_plans_keep_to_the_limit(model, gpu):
    for context, share in product((4096, 65536), SHARES):
        try:
            answer = planner.recommend(model, gpu, context, batch=4, memory_utilization=share, yarn=True)
        except planner.NothingFits:
            continue
        limit = share * question_of(model, gpu).profile.hardware.memory_bytes
        assert answer.memory_limit_bytes == limit
        assert answer.predicted.best.peak_memory_bytes <= limit


# Times and memory never fall when work grows, at the rates of calibrated machines and of others.

RISING_MODELS = ("Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-30B-A3B", "DeepSeek-V3", "gemma-3-12b-it")
NEW_TOKENS = 64
RISING_BATCHES = np.arange(1.0, 300.0)
RISING_CONTEXTS = np.unique(np.geomspace(16, 1 << 20, 400).round())
GAMMAS = np.arange(1.0, 16.0)
ROUNDING = 1 - 1e-9
# Presets that draft, for every model that they are priced for.
DRAFTING = [
    (name, model)
    for name in PRESETS
    for model in RISING_MODELS
    if name.startswith(("quantspec", "magicdec"))
    and missing_cost_model(preset(name, Workload(model, "h200", 8192)), load_shape(model)) is None
]


def estimates(name: str, model: str, gpu: str, **varying: np.ndarray) -> Estimate:
    """A preset with arrays in place of some of its strategy's fields, everything on the device."""
    shape, machine = load_shape(model), Machine.of(profile_for(load_hardware(gpu), shipped_profiles()))
    machine = replace(machine, memory_bytes=1e15)
    plan = preset(name, Workload(model, gpu, 8192, NEW_TOKENS, 3))
    strategy = strategy_of(plan, shape, machine, 0.9).with_terms(**varying)
    return evaluate(shape, machine, strategy, rates_of(plan, shape, machine))


def rises(values: np.ndarray, allowed: float = 0.0) -> bool:
    """Whether no value is below the one before it, but for an `allowed` share."""
    return bool((values[1:] >= values[:-1] * (ROUNDING - allowed)).all())


@pytest.mark.parametrize("gpu", ["h200", "h100", "a100", "rtx4090"])
@pytest.mark.parametrize("model", RISING_MODELS)
@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "int4-weights"])
def test_more_sequences_take_more_time_and_memory(name: str, model: str, gpu: str) -> None:
    estimated = estimates(name, model, gpu, batch=RISING_BATCHES)
    for values in (
        estimated.round.draft_s,
        estimated.round.verify_s,
        estimated.round.total_s,
        estimated.ttft_s,
        estimated.memory.peak,
    ):
        # Products of codes change kernels above four rows, and each kernel's rates are fitted alone.
        assert rises(np.broadcast_to(values, RISING_BATCHES.shape), 1e-3)


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("model", RISING_MODELS)
@pytest.mark.parametrize("name", ["autoregressive", "int8", "quantspec", "quantspec-exact", "magicdec-streaming"])
def test_longer_contexts_take_more_time(name: str, model: str, gpu: str) -> None:
    estimated = estimates(name, model, gpu, context=RISING_CONTEXTS)
    # Layers with a window keep no codes of the tokens in it, unless no sequence outgrows it: less memory, less to
    # quantize behind the prompt, and attention in full precision, which takes less time to launch.
    windows = {attention.window_tokens for attention, _ in load_shape(model).attentions}
    outgrown = {tokens + 1 - NEW_TOKENS for tokens in windows if tokens}
    times = estimated.round
    for values in (estimated.memory.kv, estimated.ttft_s, times.draft_s, times.verify_s, times.total_s):
        # Prompts that are long enough for cuDNN take less time than those a little shorter.
        edges = sorted(outgrown | {PADDED_PROMPT_TOKENS}) if values is estimated.ttft_s else sorted(outgrown)
        parts = np.split(np.broadcast_to(values, RISING_CONTEXTS.shape), np.searchsorted(RISING_CONTEXTS, edges))
        assert all(map(rises, parts)) and (parts[0][0] < parts[-1][-1] or values is times.draft_s)


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(("name", "model"), DRAFTING)
def test_more_drafts_take_more_time_a_round(name: str, model: str, gpu: str) -> None:
    estimated = estimates(name, model, gpu, gamma=GAMMAS)
    for values in (estimated.round.verify_s, estimated.round.total_s, estimated.memory.decode_peak):
        assert rises(np.broadcast_to(values, GAMMAS.shape))
