"""Rows of drafts that have fewer bits and read fewer tokens: one measurement of what a plan's drafts are together."""

from dataclasses import asdict, replace

import pytest

from ridgeplan.planner.acceptance import AcceptanceModel, AcceptanceRow, row_name
from ridgeplan.planner.acceptance.rows import DRAFTS, differences, plan_differences
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset

LLAMA = "Llama-3.1-8B"
ROW = AcceptanceRow(
    "w4kv4+specattn", "meta-llama/Llama-3.1-8B", 8.03, 32768, 0.8, "measured", "here", ratio=0.07, gamma=4,
    quantizer="gptq", dtype="bfloat16", tokens=256, text="my text",
)  # fmt: skip


def plan_of(name, ratio=0.07):
    plan = preset(name, Workload(LLAMA, "h200", 32768))
    sparse = plan.speculation.ratio < 1
    return replace(plan, speculation=plan.speculation.with_ratio(ratio)) if sparse else plan


def known(name, own=(), ratio=0.07):
    return AcceptanceModel.for_model(load_shape(LLAMA), 32768, [asdict(row) for row in own]).of(plan_of(name, ratio))


@pytest.mark.parametrize(
    "name, row",
    [
        ("autoregressive", ""), ("quantspec", "w4kv4"), ("quantspec-kv", "kv4"), ("quantspec-weights", "w4"),
        ("specattn", "specattn"), ("specattn-int4", "w4kv4+specattn"),
    ],
)  # fmt: skip
def test_a_plans_row_is_named_by_all_its_differences(name, row):
    plan = plan_of(name)
    assert row_name(plan) == row
    if row:
        assert row in DRAFTS
        assert differences(row) == plan_differences(plan)


def test_a_row_of_the_whole_is_measured_and_moves_its_prediction():
    before, after = known("specattn-int4"), known("specattn-int4", [ROW])
    assert before.source != "measured"
    assert (after.source, after.where) == ("measured", str(ROW))
    assert abs(after.best - 0.8) < abs(before.best - 0.8)
    assert abs(after.best - 0.8) < 0.03


def test_it_speaks_only_for_its_own_plan_and_ratios_near_it():
    assert known("specattn-int4", [ROW], ratio=0.14).source == "measured"
    assert known("specattn-int4", [ROW], ratio=0.25).source != "measured"
    assert known("specattn", [ROW]).source != "measured"
    assert known("quantspec", [ROW]).source != "measured"
