"""The best plan of each family, against an evaluation of every plan one by one."""

import numpy as np
import pytest

from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.search.candidates import search
from ridgeplan.planner.search.question import ask
from ridgeplan.planner.search_space import Family, families
from ridgeplan.roofline.evaluate import evaluate

QUESTIONS = {
    "8B at 120k": ("Llama-3.1-8B", "h200", 120_000, {}),
    "small model, batch of 16": ("Qwen2.5-0.5B", "h100", 3000, {"batch": 16, "quality": "lossy"}),
    "experts, whole request": ("Qwen3-30B-A3B", "a100", 20_000, {"batch": 3, "objective": "total"}),
    "least memory": ("Llama-3.1-8B", "rtx4090", 30_000, {"objective": "memory", "quality": "lossy"}),
    "offloaded": ("Llama-3.1-8B", "rtx4090", 120_000, {"memory_limit": "20GB"}),
}


@pytest.mark.parametrize("model, gpu, context, options", QUESTIONS.values(), ids=QUESTIONS)
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
    tokens_s = question.workload.new_tokens * estimate.tpot_s
    objective = {"latency": estimate.tpot_s, "total": estimate.ttft_s + tokens_s, "memory": estimate.memory.peak}
    return tuple(map(float, (objective[question.objective], estimate.tpot_s, estimate.memory.peak)))
