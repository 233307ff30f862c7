"""The best plan of each family, against an evaluation of every plan one by one."""

from importlib import import_module
from itertools import repeat

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import Candidate, Family, families, fits_whole, search, within_limit
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.plan.policies.base import unpriced
from ridgeplan.roofline.plan.presets import PRESETS

QUESTIONS = {
    "8B at 120k": ("Llama-3.1-8B", "h200", 120_000, {}),
    "small model, batch of 16": ("Qwen2.5-0.5B", "h100", 3000, {"batch": 16, "quality": "lossy"}),
    "experts, whole request": ("Qwen3-30B-A3B", "a100", 20_000, {"batch": 3, "objective": "total"}),
    "least memory": ("Llama-3.1-8B", "rtx4090", 30_000, {"objective": "memory", "quality": "lossy"}),
    "offloaded": ("Llama-3.1-8B", "rtx4090", 120_000, {"memory_limit": "20GB"}),
}

OFTEN = ("8B at 120k", "offloaded", "least memory")
MORE_QUESTIONS = QUESTIONS | {
    "16 rows": ("Llama-3.1-8B", "h200", 4096, {"batch": 16}),
    "exact": ("Qwen3-8B", "h200", 32_000, {"quality": "exact", "batch": 4}),
    "small GPU": ("SmolLM2-135M", "rtx4060-laptop", 512, {}),
    "large model": ("Llama-3.1-70B", "b200", 65_536, {"batch": 8}),
    "any backend, sliding window": ("Mistral-7B-v0.1", "h100", 3000, {"batch": 2, "backend": "any"}),
    "one cache format": ("Qwen3-32B", "h200", 30_000, {"quality": "lossy", "kv_format": "int4x2"}),
    "mixed bits": ("gpt-oss-20b", "h100", 60_000, {}),
    "few new tokens": ("Llama-3.1-8B", "h200", 120_000, {"objective": "total", "new_tokens": 64}),
    "nearly full": ("Llama-3.1-8B", "a6000", 100_000, {"batch": 3, "memory_utilization": 0.8}),
}


def asked(questions, often=OFTEN):
    """Parameters of a test: those of `often` each time, the others among the slow ones."""
    for name, question in questions.items():
        yield pytest.param(*question, id=name, marks=[] if name in often else [pytest.mark.slow])


@pytest.mark.parametrize("model, gpu, context, options", asked(QUESTIONS))
def test_each_family_has_its_best_plan(model, gpu, context, options):
    """Among plans that fit, the lowest objective, and of equal ones the first; else the least memory."""
    question = ask(model, gpu, context, **options)
    model_of = AcceptanceModel.of_profile(question.shape, context, question.profile)
    found = search(question)
    by_name = {one.name: one for one in families(question.workload, offload=True, quality=question.quality)}
    assert len(found) > 40
    for candidate in found[::12]:
        figures = [_figures(*point, question, model_of) for point in _plans(by_name[candidate.name])]
        objective, _, peak = np.transpose(figures)
        fits = peak <= question.memory_limit_bytes
        best = int(np.argmin(np.where(fits, objective, np.inf) if fits.any() else peak))
        assert (candidate.score, candidate.tpot_s, candidate.peak_bytes) == pytest.approx(figures[best], rel=1e-12)
        wanted = list(_plans(by_name[candidate.name]))[best][1].speculation
        assert (candidate.plan.speculation.gamma, candidate.plan.speculation.ratio) == (wanted.gamma, wanted.ratio)


@pytest.mark.parametrize("model, gpu, context, options", asked(MORE_QUESTIONS, (*OFTEN, "mixed bits", "nearly full")))
def test_whole_answers_are_those_of_a_search_plan_by_plan(model, gpu, context, options, monkeypatch):
    """The recommendation, what is within its noise, every alternative with its reason, and the best of all."""
    answer = planner.recommend(model, gpu, context, **options)
    for module in ("recommend", "feasibility"):
        monkeypatch.setattr(import_module(f"ridgeplan.planner.{module}"), "search", plan_by_plan)
    assert answer == planner.recommend(model, gpu, context, **options)
    assert len(answer.alternatives) > 10


def plan_by_plan(question, searched=None):
    """`search` where each plan has its own strategy and rates, and the best of a family is sought one by one."""
    if searched is None:
        offload = question.offload and not fits_whole(question)
        known = families(question.workload, offload=offload, quality=question.quality)
        searched = [family for family in known if unpriced(family.template, question.shape) is None]
    plans = [plan for family in searched for _, plan in _plans(family)]
    figures = iter(zip(plans, *_figures_of_all(searched, plans, question), strict=True))
    found = []
    for family in searched:
        own = [next(figures) for _ in range(family.size)]
        fitting = [one for one in own if question.misfit(*one[3:5]) is None]
        best = min(fitting, key=lambda one: one[1]) if fitting else min(own, key=lambda one: one[3])
        if family.name in PRESETS or not family.template.placement.offload or best[5]:
            found.append(Candidate(family.name, within_limit(best[0], question.memory_limit_bytes), *best[1:5]))
    return found


def _figures_of_all(searched, plans, question):
    """Objective, time per token, memory, that of the host and layers there of plans side by side: each [plans]."""
    model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
    acceptance = np.concatenate([model.best(family.template, *family.grid()) for family in searched])
    shape, machine = question.shape, question.machine
    strategies = [strategy_of(*one) for one in zip(plans, repeat(shape), repeat(machine), acceptance, strict=False)]
    rates = [rates_of(plan, shape, machine) for plan in plans]
    once = [1] * len(plans)
    estimate = evaluate(shape, machine, stack(strategies, once), stack(rates, once))
    figures = (
        _objective(estimate, question), estimate.tpot_s, estimate.memory.peak, estimate.host_bytes,
        estimate.offloaded_layers,
    )  # fmt: skip
    return [np.broadcast_to(np.asarray(one, dtype=float), len(plans)).tolist() for one in figures]


def _plans(family: Family):
    return ((family, family.plan(gamma, ratio)) for gamma, ratio in zip(*family.grid(), strict=True))


def _figures(family, plan, question, model):
    """Objective, time per token and memory of one plan, in numbers."""
    speculation, machine = plan.speculation, question.machine
    (acceptance,) = model.best(family.template, np.array([speculation.gamma]), np.array([speculation.ratio]))
    estimate = evaluate(
        question.shape, machine,
        strategy_of(plan, question.shape, machine, float(acceptance)), rates_of(plan, question.shape, machine),
    )  # fmt: skip
    return tuple(map(float, (_objective(estimate, question), estimate.tpot_s, estimate.memory.peak)))


def _objective(estimate, question):
    tokens_s = question.workload.new_tokens * estimate.tpot_s
    found = {"latency": estimate.tpot_s, "total": estimate.ttft_s + tokens_s, "memory": estimate.memory.peak}
    return found[question.objective]
