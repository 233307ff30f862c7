"""The overlap of adjacent steps that policies are priced by, against what a study measured."""

import json
from pathlib import Path

import pytest

from ridgeplan import validate
from ridgeplan.roofline.plan.draft_selection import draft_selection
from ridgeplan.roofline.plan.policies import selections
from ridgeplan.roofline.plan.policies.base import KV_BUDGET, Role, SelectionCost

RESULTS = Path(validate.__file__).parent / "results"
METHODS = ["progressive", "quest", "clusterkv", "shadowkv", "streamingllm"]


def measured(model):
    rows = json.loads((RESULTS / f"study_retrieval_{model}_16k.json").read_text())["rows"]
    return {(row["method"], row["budget"]): row["overlap"] for row in rows}


def cost(method, **options):
    (policy,) = [one for one in selections(Role.TARGET) if one.name == method]
    return policy.cost(draft_selection(method, **options))


@pytest.mark.parametrize("method", METHODS)
def test_policies_are_priced_by_what_was_measured(method):
    """Of Qwen; the other model's is near it."""
    assert cost(method).overlap == pytest.approx(measured("qwen")[method, KV_BUDGET], abs=0.006)
    assert cost(method).overlap == pytest.approx(measured("smollm2")[method, KV_BUDGET], abs=0.03)


@pytest.mark.parametrize("level", ["head", "batch"])
def test_a_heads_choice_for_all_kv_heads_changes_less(level):
    found = measured("smollm2")[f"retrieval-{level}", KV_BUDGET]
    assert cost("retrieval-head", level=level).overlap == pytest.approx(found, abs=0.006)


@pytest.mark.parametrize("model", ["qwen", "smollm2"])
def test_by_default_it_is_that_of_the_models_own_attention(model):
    assert SelectionCost().overlap == pytest.approx(measured(model)["model", KV_BUDGET], abs=0.015)


@pytest.mark.parametrize("budget", [512, 1024, 4096])
@pytest.mark.parametrize("method", METHODS)
def test_other_budgets_follow_from_it(method, budget):
    """But for ShadowKV's 512 tokens, which are recent ones and outliers, and nothing else."""
    if (method, budget) != ("shadowkv", 512):
        assert cost(method).overlap_at(budget) == pytest.approx(measured("qwen")[method, budget], abs=0.055)


def test_of_a_few_tokens_all_may_be_new():
    assert SelectionCost(overlap=0.5).overlap_at(1) == 0
