"""The search space: its families, their grids, and names of plans."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.search import RATIOS, families
from ridgeplan.roofline.plan.draft_selection import SpecAttn
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
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.roofline.plan.policies.base import Role
from ridgeplan.roofline.plan.presets import PRESETS, describe, family_key, preset, preset_name

WORKLOAD = Workload("m", "h200", 32768)
# 4 caches x 2 target weights x 2 draft weights x selections, of which one needs codes (4); the target itself is no
# draft (4), plain caches are no drafts (4).
JOINT = 4 * 2 * 2 * sum(policy.searched for policy in selections(Role.DRAFT)) - 4 - 4 + 4


@pytest.fixture(scope="module")
def found():
    return {family.name: family for family in families(WORKLOAD, offload=False)}


def test_a_grid_pairs_every_gamma_with_every_ratio(found):
    gamma, ratio = found["specattn"].grid()
    assert sorted(zip(gamma, ratio, strict=True)) == sorted((g, r) for g in range(1, 16) for r in RATIOS)
    assert found["specattn"].size == len(gamma) == 15 * 7


@pytest.mark.parametrize(
    "name, size", [("autoregressive", 1), ("quantspec", 15), ("quest", 1), ("magicdec-quest", 105)]
)
def test_only_what_a_plan_has_varies(found, name, size):
    assert found[name].size == size


def test_a_point_of_the_grid_is_the_template_with_its_gamma_and_ratio(found):
    plan = found["specattn"].plan(np.int64(3), np.float64(0.25))
    template = found["specattn"].template
    assert plan == replace(template, speculation=replace(template.speculation, gamma=3).with_ratio(0.25))
    assert found["autoregressive"].plan(0, 1.0) == preset("autoregressive", WORKLOAD)


def test_the_joint_space_is_complete_and_holds_no_system_twice(found):
    """Presets keep their names where they are points of the joint space."""
    presets = [make(WORKLOAD) for make in PRESETS.values()]
    inside = [
        plan
        for plan in presets
        if (plan.eviction, plan.attention, plan.placement) == (Eviction(), TargetAttention(), Placement())
        and plan.weights.target_bits != 4
    ]
    assert len(inside) >= 12
    assert len(found) == len(presets) + JOINT - len(inside)
    assert set(PRESETS) <= set(found)
    keys = [family_key(family.template) for family in found.values()]
    assert len(set(keys)) == len(keys)
    drafting = [family.template for family in found.values() if family.template.speculation.active]
    quest_on_shadow = [
        plan
        for plan in drafting
        if plan.kv.format is KVFormat.SHADOW
        and plan.weights.draft_bits == 4
        and plan.speculation.selection.name == "quest"
    ]
    assert [plan.weights.target_bits for plan in quest_on_shadow] == [16, 8]
    assert {plan.speculation.codes for plan in quest_on_shadow} == {DraftCodes.UPPER}


def test_drafts_differ_from_the_target(found):
    for family in found.values():
        plan = family.template
        same_reads = plan.speculation.codes is DraftCodes.FULL and not plan.speculation.sparse
        assert not (plan.speculation.active and same_reads and not plan.weights.draft_differs), family.name


def test_offloading_adds_plain_decoding_and_drafts_on_upper_codes(found):
    """Plain on bf16 and on int8; drafts on the target's weights and on 4-bit ones, with lower codes on the host."""
    added = [family.template for family in families(WORKLOAD, offload=True) if family.name not in found]
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
    assert describe(drafting) == "w4 + int4x2 KV + drafts on upper codes"
    sparse = replace(preset("specattn", WORKLOAD), weights=Weights(draft_bits=4))
    assert preset_name(sparse) == "drafts on full codes of specattn, w4 drafts"
    assert describe(preset("autoregressive", WORKLOAD)) == "autoregressive"
    assert describe(preset("specontext", WORKLOAD)) == "offload + target on retrieval-head"


def test_short_prompts_have_smaller_budgets():
    short = replace(WORKLOAD, context=700)
    assert preset("dapq", short).eviction.budget == 700
    assert preset("quest", short).attention.budget == 700
    assert preset("dapq", WORKLOAD).eviction.budget == 1024


def test_an_unknown_preset_is_named_with_its_neighbours():
    with pytest.raises(PlanError, match=r"unknown preset 'quantspek'\. Did you mean quantspec"):
        preset("quantspek", WORKLOAD)


def test_the_papers_hyperparameters():
    """QuantSpec compares MagicDec at a quarter of the tokens; SpecAttn drafts 7 tokens from 7% of them."""
    specattn = Speculation(7, selection=SpecAttn(ratio=0.07))
    assert preset("specattn", WORKLOAD).speculation == specattn
    assert [preset(f"magicdec-{name}", WORKLOAD).speculation.ratio for name in ("streaming", "snapkv")] == [0.25] * 2
