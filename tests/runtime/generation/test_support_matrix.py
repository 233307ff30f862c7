"""The runtime executes the plans that `missing_execution` admits for a family, and refuses the others in one line."""

from dataclasses import replace

import pytest
from grids import pairs
from tiny_families import FAMILY_SIZES

from ridgeplan import runtime
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Placement, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.plan.support import as_loaded, missing_cost_model, missing_execution
from ridgeplan.runtime.errors import UnsupportedPlan

CONTEXT, NEW, GROUP = 300, 8, 32
PLANS = ("progressive", "quantspec", "snapkv", "offload", "int8-weights", "int4-weights")


@pytest.mark.parametrize(("family", "name"), pairs(("llama", *FAMILY_SIZES), PLANS, always=0))
def test_executed_or_refused_as_planned(family, name, tiny_model, prompts):
    folder = tiny_model(family).folder
    plan = preset("autoregressive" if name == "offload" else name, Workload("tiny", "cpu", CONTEXT, new_tokens=NEW))
    plan = replace(plan, kv=replace(plan.kv, group=GROUP), weights=replace(plan.weights, group=GROUP))
    if name == "offload":
        plan = replace(plan, placement=Placement(offload=True, budget=GROUP))
    if name == "snapkv":
        plan = replace(plan, eviction=replace(plan.eviction, budget=128))
    shape = as_loaded(load_shape(folder))
    if missing_cost_model(plan, shape) or missing_execution(plan, shape):
        with pytest.raises(UnsupportedPlan) as error:
            runtime.load(plan, folder, device="cpu")
        assert "\n" not in str(error.value)
    else:
        tokens = runtime.load(plan, folder, device="cpu").generate(prompts(CONTEXT), NEW).tokens
        assert len(tokens[0]) == NEW
