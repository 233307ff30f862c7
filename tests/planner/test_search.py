"""The search space: its families, their grids, and names of plans."""

from dataclasses import replace
from importlib import import_module
from itertools import product, repeat

import numpy as np
import pytest

from ridgeplan import planner
from ridgeplan.planner.acceptance import AcceptanceModel
from ridgeplan.planner.lowering import rates_of, stack, strategy_of
from ridgeplan.planner.quality import Quality
from ridgeplan.planner.question import ask
from ridgeplan.planner.search import (
    RATIOS,
    Candidate,
    Family,
    families,
    figures_of,
    fits_whole,
    is_searched,
    named_plan,
    search,
    within_limit,
)
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import evaluate
from ridgeplan.roofline.plan.plan import (
    DraftCodes,
    Eviction,
    HostPart,
    KVFormat,
    Placement,
    PlanError,
    Speculation,
    TargetAttention,
    Weights,
    Workload,
)
from ridgeplan.roofline.plan.policies.selections import SpecAttn
from ridgeplan.roofline.plan.policy import SELECTIONS
from ridgeplan.roofline.plan.presets import PRESETS, describe, family_key, preset, preset_name, short_name
from ridgeplan.roofline.plan.support import missing_cost_model

WORKLOAD = Workload("m", "h200", 32768)
# 4 caches x 2 target weights x 2 draft weights x selections, of which one needs codes (4); the target itself is no
# draft (4), plain caches are no drafts (4).
JOINT = 4 * 2 * 2 * sum(policy.searched for policy in SELECTIONS.values()) - 4 - 4 + 4


@pytest.fixture(scope="module")
def families_by_name():
    return {family.name: family for family in families(WORKLOAD, offload=False)}


def test_figures_pair_every_gamma_with_every_ratio(families_by_name):
    family = families_by_name["specattn-weights"]
    figures = figures_of([family], ask("meta-llama/Llama-3.1-8B", "h200", 32768), (WORKLOAD,), (1,))
    gamma, ratio = (np.ravel(values).tolist() for values in (figures.gamma, figures.ratio))
    assert sorted(zip(gamma, ratio, strict=True)) == sorted((g, r) for g in range(1, 16) for r in RATIOS)
    assert family.size == len(gamma) == 15 * 7


@pytest.mark.parametrize(
    "name, size", [("autoregressive", 1), ("quantspec", 15), ("quest", 1), ("magicdec-quest", 105)]
)
def test_only_what_a_plan_has_varies(families_by_name, name, size):
    assert families_by_name[name].size == size


def test_a_point_of_the_grid_is_the_template_with_its_gamma_and_ratio(families_by_name):
    plan = families_by_name["specattn-weights"].plan(np.int64(3), np.float64(0.25))
    template = families_by_name["specattn-weights"].template
    assert plan == replace(template, speculation=replace(template.speculation, gamma=3).with_ratio(0.25))
    assert families_by_name["autoregressive"].plan(0, 1.0) == preset("autoregressive", WORKLOAD)


def test_the_joint_space_is_complete_and_holds_no_system_twice(families_by_name):
    """Presets keep their names where they are points of the joint space."""
    plans = {name: make(WORKLOAD) for name, make in PRESETS.items()}
    presets = [plan for plan in plans.values() if is_searched(plan)]
    inside = [
        plan
        for plan in presets
        if (plan.eviction, plan.attention, plan.placement) == (Eviction(), TargetAttention(), Placement())
        and plan.weights.target_bits != 4
    ]
    assert len(inside) >= 12
    assert len(families_by_name) == len(presets) + JOINT - len(inside)
    assert {name for name, plan in plans.items() if is_searched(plan)} <= set(families_by_name)
    keys = [family_key(family.template) for family in families_by_name.values()]
    assert len(set(keys)) == len(keys)
    drafting = [family.template for family in families_by_name.values() if family.template.speculation.active]
    quest_on_shadow = [
        plan
        for plan in drafting
        if plan.kv.format is KVFormat.SHADOW
        and plan.weights.draft_bits == 4
        and plan.speculation.selection.name == "quest"
    ]
    assert [plan.weights.target_bits for plan in quest_on_shadow] == [16, 8]
    assert {plan.speculation.codes for plan in quest_on_shadow} == {DraftCodes.UPPER}


def test_drafts_differ_from_the_target(families_by_name):
    for family in families_by_name.values():
        plan = family.template
        same_reads = plan.speculation.codes is DraftCodes.FULL and not plan.speculation.sparse
        assert not (plan.speculation.active and same_reads and not plan.weights.draft_differs), family.name


def test_offloading_adds_plain_decoding_and_drafts_on_upper_codes(families_by_name):
    """Plain on bf16 and on int8; drafts on the target's weights and on 4-bit ones, with lower codes on the host."""
    added = [family.template for family in families(WORKLOAD, offload=True) if family.name not in families_by_name]
    assert all(plan.placement.offload for plan in added)
    plain = {(plan.kv.format, plan.placement.budget) for plan in added if not plan.speculation.active}
    assert plain == {(KVFormat.FULL, 2048), (KVFormat.INT8, 2048)}
    drafting = [plan for plan in added if plan.speculation.active]
    assert {plan.placement.part for plan in drafting} == {HostPart.LOWER}
    assert {(16, 16), (16, 4)} <= {(plan.weights.target_bits, plan.weights.draft_bits) for plan in drafting}


def test_preset_names_survive_other_hyperparameters():
    plan = preset("quantspec", WORKLOAD)
    assert preset_name(replace(plan, speculation=replace(plan.speculation, gamma=9))) == "quantspec"
    assert preset_name(preset("snapkv", replace(WORKLOAD, context=500))) == "snapkv"  # a smaller budget
    for name in PRESETS:
        assert preset_name(preset(name, WORKLOAD)) == name


def test_plans_without_a_name_are_described():
    drafting = replace(preset("quantspec", WORKLOAD), weights=Weights(4, 4))
    assert describe(drafting) == "4-bit weights + INT4x2 KV + drafts on upper codes"
    sparse = replace(preset("specattn-weights", WORKLOAD), weights=Weights(draft_bits=4))
    assert preset_name(sparse) == "4-bit drafts on tokens chosen by specattn-weights"
    assert describe(preset("autoregressive", WORKLOAD)) == "autoregressive"
    assert describe(preset("specontext", WORKLOAD)) == "offload + target on tokens chosen by retrieval-head"


def test_every_searched_plan_has_one_long_and_one_short_name_that_find_it():
    known = families(WORKLOAD, offload=True, quality=Quality.LOSSY)
    names = [family.name for family in known]
    assert len(set(names)) == len(set(map(short_name, names))) == len(names) > 150
    for family in known:
        assert not set(" ,") & set(short_name(family.name))
        for name in (family.name, short_name(family.name), short_name(describe(family.template))):
            assert family_key(named_plan(name, WORKLOAD)) == family_key(family.template)
    name = "8-bit weights + INT4x2 KV + 4-bit drafts on upper codes of tokens chosen by specextend"
    assert (name in names, short_name(name)) == (True, "w8+int4x2+upper:specextend/w4")


def test_short_prompts_have_smaller_budgets():
    short = replace(WORKLOAD, context=700)
    assert preset("dapq", short).eviction.budget == 700
    assert preset("quest", short).attention.budget == 700
    assert preset("dapq", WORKLOAD).eviction.budget == 1024


def test_an_unknown_preset_is_named_with_its_neighbours():
    with pytest.raises(PlanError, match=r"unknown preset 'quantspek'\. Did you mean quantspec"):
        preset("quantspek", WORKLOAD)


def test_a_plan_that_offloads_where_everything_fits_is_refused(h200_profile):
    with pytest.raises(planner.PlanError, match="'offload' offloads nothing here, as everything fits"):
        planner.estimate(LLAMA, "h200", 4096, preset="offload", profile=h200_profile)


def test_the_papers_hyperparameters():
    """QuantSpec compares MagicDec at a quarter of the tokens; SpecAttn drafts 7 tokens from 7% of them."""
    specattn = Speculation(7, selection=SpecAttn(ratio=0.07))
    assert preset("specattn", WORKLOAD).speculation == specattn
    assert [preset(f"magicdec-{name}", WORKLOAD).speculation.ratio for name in ("streaming", "snapkv")] == [0.25] * 2


# The best plan of each family, against an evaluation of every plan one by one.

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


def question_params(questions, often=OFTEN):
    """Parameters of a test: those of `often` each time, the others among the slow ones."""
    for name, question in questions.items():
        yield pytest.param(*question, id=name, marks=[] if name in often else [pytest.mark.slow])


@pytest.mark.parametrize("model, gpu, context, options", question_params(QUESTIONS))
def test_each_family_has_its_best_plan(model, gpu, context, options):
    """Among plans that fit, the lowest objective, and of equal ones the first; else the least memory."""
    question = ask(model, gpu, context, **options)
    model_of = AcceptanceModel.of_profile(question.shape, context, question.profile)
    candidates = search(question)
    by_name = {
        family.name: family for family in families(question.workload, offload=True, quality=question.options.quality)
    }
    assert len(candidates) > 40
    for candidate in candidates[::60]:
        figures = [_figures(*point, question, model_of) for point in _plans(by_name[candidate.name])]
        objective, _, peak = np.transpose(figures)
        fits = peak <= question.memory_limit_bytes
        best = int(np.argmin(np.where(fits, objective, np.inf) if fits.any() else peak))
        assert (candidate.score, candidate.tpot_s, candidate.peak_bytes) == pytest.approx(figures[best], rel=1e-12)
        expected = list(_plans(by_name[candidate.name]))[best][1].speculation
        assert (candidate.plan.speculation.gamma, candidate.plan.speculation.ratio) == (expected.gamma, expected.ratio)


@pytest.mark.parametrize(
    "model, gpu, context, options", question_params(MORE_QUESTIONS, ("offloaded", "mixed bits", "nearly full"))
)
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
        offload = question.options.offload and not fits_whole(question)
        known = families(question.workload, offload=offload, quality=question.options.quality)
        searched = [family for family in known if missing_cost_model(family.template, question.shape) is None]
    plans = [plan for family in searched for _, plan in _plans(family)]
    figures = iter(zip(plans, *_figures_of_all(searched, plans, question), strict=True))
    results = []
    for family in searched:
        evaluated = [next(figures) for _ in range(family.size)]
        fitting = [
            figures_of_plan for figures_of_plan in evaluated if question.oom_reason(*figures_of_plan[3:5]) is None
        ]
        best = (
            min(fitting, key=lambda figures_of_plan: figures_of_plan[1])
            if fitting
            else min(evaluated, key=lambda figures_of_plan: figures_of_plan[3])
        )
        if family.name in PRESETS or not family.template.placement.offload or best[5]:
            results.append(Candidate(family.name, within_limit(best[0], question.memory_limit_bytes), *best[1:5]))
    return results


def _figures_of_all(searched, plans, question):
    """Objective, time per token, memory, that of the host and layers there of plans side by side: each [plans]."""
    model = AcceptanceModel.of_profile(question.shape, question.workload.context, question.profile)
    grids = (np.transpose([*product(family.gammas, family.ratios)]) for family in searched)
    acceptance = [model.competing(family.template, *grid) for family, grid in zip(searched, grids, strict=True)]
    shape, machine = question.shape, question.machine
    strategies = [
        strategy_of(*plan)
        for plan in zip(plans, repeat(shape), repeat(machine), np.concatenate(acceptance), strict=False)
    ]
    rates = [rates_of(plan, shape, machine) for plan in plans]
    once = [1] * len(plans)
    estimate = evaluate(shape, machine, stack(strategies, once), stack(rates, once))
    figures = (
        _objective(estimate, question), estimate.tpot_s, estimate.memory.peak, estimate.host_bytes,
        estimate.offloaded_layers,
    )  # fmt: skip
    return [np.broadcast_to(np.asarray(figure, dtype=float), len(plans)).tolist() for figure in figures]


def _plans(family: Family):
    return ((family, family.plan(gamma, ratio)) for gamma, ratio in product(family.gammas, family.ratios))


def _figures(family, plan, question, model):
    """Objective, time per token and memory of one plan, in numbers."""
    speculation, machine = plan.speculation, question.machine
    (acceptance,) = model.competing(family.template, np.array([speculation.gamma]), np.array([speculation.ratio]))
    estimate = evaluate(
        question.shape, machine,
        strategy_of(plan, question.shape, machine, float(acceptance)), rates_of(plan, question.shape, machine),
    )  # fmt: skip
    return tuple(map(float, (_objective(estimate, question), estimate.tpot_s, estimate.memory.peak)))


def _objective(estimate, question):
    tokens_s = question.workload.new_tokens * estimate.tpot_s
    objectives = {"latency": estimate.tpot_s, "total": estimate.ttft_s + tokens_s, "memory": estimate.memory.peak}
    return objectives[question.options.objective]


# The best gamma of a grid is the best of all gammas, one at a time.

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("name", ["quantspec", "specattn"])
def test_every_cell_is_the_best_of_all_gammas(h200_profile, name):
    shape = load_shape(LLAMA)
    cells = planner.best_gamma(LLAMA, "h200", preset=name, contexts=(4096, 65536), batches=(1, 8), profile=h200_profile)
    assert [(cell.context, cell.batch) for cell in cells] == [(4096, 1), (4096, 8), (65536, 1), (65536, 8)]
    for cell in cells:
        workload = Workload(LLAMA, "h200", cell.context, 1024, cell.batch)
        plan = preset(name, workload)
        plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in range(1, 16)]
        times = [planner.predict(plan, shape, h200_profile).best.tpot_ms for plan in plans]
        plain = planner.predict(preset("autoregressive", workload), shape, h200_profile)
        assert cell.tpot_ms == pytest.approx(min(times))
        assert cell.gamma == 1 + times.index(min(times))
        assert cell.speedup == pytest.approx(plain.best.tpot_ms / min(times))
        assert cell.fits


def test_cells_say_whether_they_fit(h200_profile):
    cells = planner.best_gamma(LLAMA, "h200", contexts=(131_072,), batches=(1, 64), profile=h200_profile)
    assert [cell.fits for cell in cells] == [True, False]
    tight = planner.best_gamma(LLAMA, "h200", contexts=(4096,), batches=(1,), profile=h200_profile, memory_limit=1e9)
    assert not tight[0].fits


def test_of_gammas_only_those_that_fit_are_chosen(h200_profile):
    """A draft more is a token more of every sequence in the cache, so a limit can lie between two gammas."""
    shape, workload = load_shape(LLAMA), Workload(LLAMA, "h200", 4096, 1024, 64)
    plan = preset("quantspec", workload)
    plans = [replace(plan, speculation=replace(plan.speculation, gamma=gamma)) for gamma in (1, 2)]
    smallest, next_one = (planner.predict(plan, shape, h200_profile).best for plan in plans)
    assert next_one.tpot_ms < smallest.tpot_ms
    limit = (smallest.peak_memory_bytes + next_one.peak_memory_bytes) / 2
    (cell,) = planner.best_gamma(
        LLAMA, "h200", contexts=(4096,), batches=(64,), profile=h200_profile, memory_limit=limit
    )
    assert (cell.gamma, cell.fits) == (1, True)
    assert cell.tpot_ms == pytest.approx(smallest.tpot_ms)


def test_contexts_end_at_the_models_limit():
    cells = planner.best_gamma("Qwen/Qwen2.5-0.5B", "h200", batches=(1,))
    assert [cell.context for cell in cells] == [4096, 16384, 32768]


def test_a_preset_without_drafts_is_refused():
    with pytest.raises(planner.PlanError, match="preset 'int8' drafts nothing; allowed: one that speculates"):
        planner.best_gamma(LLAMA, "h200", preset="int8")
    with pytest.raises(planner.PlanError, match="unknown preset"):
        planner.best_gamma(LLAMA, "h200", preset="int9")


def test_no_more_is_drafted_than_is_generated_after_the_prompts_token() -> None:
    """The first new token follows the prompt, so that of one nothing is left to draft."""
    for new_tokens, most in ((1, 0), (2, 1), (4, 3)):
        workload = Workload("meta-llama/Llama-3.1-8B", "h200", 8192, new_tokens)
        assert max(max(family.gammas) for family in families(workload, offload=True)) == most
