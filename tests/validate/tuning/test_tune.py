"""Tuning with a tiny model: what is measured, what it is named, and what becomes of the plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeplan.planner.search import RATIOS
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.draft_selection import StreamingLLM
from ridgeplan.roofline.plan.plan import Plan, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate import tuning as measured_module
from ridgeplan.validate import tuning as tune_module
from ridgeplan.validate.prompts import PromptError
from ridgeplan.validate.tuning import MeasuredDrafts, TuningText, tune

TEXT = TuningText("The quick brown fox jumps over the lazy dog. " * 40, "foxes", 40)


@pytest.fixture
def plan(tiny_folder):
    return preset("quantspec", Workload(tiny_folder.name, "h200", 260, 64, 2))


def test_a_plan_gets_the_gamma_that_is_fastest(plan, tiny_folder, h200_profile):
    found = tune(plan, str(tiny_folder), TEXT, h200_profile, 5, "cpu")
    (step,) = found.steps
    assert [one.gamma for one in step.candidates] == [1, 2, 3, 4, 5]
    assert found.chosen.tpot_ms == min(one.tpot_ms for one in step.candidates)
    assert found.plan == replace(plan, speculation=replace(plan.speculation, gamma=found.chosen.gamma))
    assert found.speedup == found.plain_ms / found.chosen.tpot_ms
    adaptive = replace(plan, speculation=replace(plan.speculation, adaptive=True))
    again = tune(adaptive, str(tiny_folder), TEXT, h200_profile, 5, "cpu")
    assert again.plan.speculation == replace(found.plan.speculation, adaptive=True)


def test_rows_say_what_was_counted(plan, tiny_folder, h200_profile, monkeypatch):
    monkeypatch.setattr(measured_module, "FEWEST_DRAFTS", 20)
    rows = tune(plan, str(tiny_folder), TEXT, h200_profile, 3, "cpu").rows
    assert [row.position for row in rows] == [1, 2, 3][: len(rows)]
    first = rows[0]
    assert (first.draft, first.ratio, first.gamma, first.context) == ("w4kv4", 1.0, 3, 260)
    assert (first.model, first.text, first.source) == (load_shape(str(tiny_folder)).name, "foxes", "measured")
    assert (first.dtype, first.quantizer) == ("float32", "diagonal")
    assert 20 <= first.tokens <= 2 * 39
    assert all(later.tokens <= sooner.tokens for sooner, later in pairwise(rows))


def test_acceptance_of_few_drafts_leans_on_the_position_before(tiny_folder, plan):
    found = MeasuredDrafts(plan, (98, 6, 0), (49, 6, 0))
    first = (49 + 2 * 55.5 / 105) / 100  # of all drafts 55.5 of 105 are accepted, Jeffreys' half included
    assert found.acceptance_at == pytest.approx((first, (6 + 2 * first) / 8, (6 + 2 * first) / 8))


def test_drafts_that_read_what_the_target_reads_leave_no_rows(tiny_folder, h200_profile):
    same = Plan(Workload(tiny_folder.name, "h200", 260, 64), speculation=Speculation(2))
    found = tune(same, str(tiny_folder), TEXT, h200_profile, 2, "cpu")
    assert found.rows == ()
    assert [one.tokens_per_round for one in found.steps[0].candidates] == pytest.approx([2, 3], rel=0.02)


def test_every_ratio_is_measured_with_one_set_of_weights(tiny_folder, h200_profile, monkeypatch):
    """Drafts read all tokens at every ratio, the latest ones of them anyway."""
    sparse = Plan(
        Workload(tiny_folder.name, "h200", 260, 64),
        speculation=Speculation(4, selection=StreamingLLM(ratio=0.3, floor=0, recent=400)),
    )
    loads, real = [], tune_module.load

    def load(plan, *given, **named):
        loads.append((plan.speculation, named["weights"] is not None))
        return real(plan, *given, **named)

    monkeypatch.setattr(tune_module, "load", load)
    found = tune(sparse, str(tiny_folder), TEXT, h200_profile, 3, "cpu")
    ratios = sorted({*RATIOS, 0.3})
    assert [(one.ratio, one.gamma, one.adaptive, shared) for one, shared in loads] == [
        (ratio, 3, False, number > 0) for number, ratio in enumerate(ratios)
    ]
    assert [step.name for step in found.steps] == ["ratio", "gamma", "ratio again"]
    # All are accepted as often, so the fewest tokens are the best.
    assert found.plan.speculation.ratio == ratios[0]


@pytest.mark.parametrize(
    "floor, expected", [(0, [0.02, 0.04, 0.07]), (29, [0.07, 0.1, 0.15]), (200, [0.5]), (400, [0.5])]
)
def test_ratios_that_read_the_same_tokens_are_measured_once(floor, expected, tiny_folder, h200_profile, monkeypatch):
    """Of 300 tokens at the end 7% are 21, 10% are 30, and half are 150."""
    selection = StreamingLLM(ratio=0.1, floor=floor)
    sparse = Plan(Workload(tiny_folder.name, "h200", 260, 64), speculation=Speculation(4, selection=selection))
    plans = list(tune_module._measured_plans(sparse, 3, TEXT.tokens))
    assert [plan.speculation.ratio for plan in plans][:3] == expected


@pytest.mark.parametrize(
    "changes, words",
    [({"largest": 0}, "the largest gamma is 0; allowed: 1 to 15"), ({"largest": 16}, "the largest gamma is 16")],
)
def test_what_cannot_be_tuned_is_refused(changes, words, plan, tiny_folder, h200_profile):
    with pytest.raises(PlanError, match=words):
        tune(plan, str(tiny_folder), TEXT, h200_profile, **changes)


def test_plans_without_drafts_and_short_texts_are_refused(plan, tiny_folder, h200_profile):
    with pytest.raises(PlanError, match="gamma 0; allowed: a plan that drafts"):
        tune(Plan(plan.workload), str(tiny_folder), TEXT, h200_profile, 3)
    with pytest.raises(PromptError, match="needed: 261"):
        tune(plan, str(tiny_folder), replace(TEXT, text="short"), h200_profile, 3, "cpu")
