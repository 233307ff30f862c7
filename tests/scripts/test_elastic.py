"""The benchmark of elastic loading runs on a CPU at small sizes, and its steps choose as much anew as they are told."""

from dataclasses import replace

import pytest
import torch
from elastic_rounds import OVERLAPS, DriftingCache, elastic_round, loading_ms

from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.plan.plan import Placement, Workload
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.validate import random_model
from ridgeplan.validate.random_model import RandomModel, llama_like_shape

CPU = torch.device("cpu")
SHAPE = llama_like_shape(layers=4, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32)
CONTEXT, BUDGET = 2048, 512
CHOSEN = BUDGET - 128  # a group is recent
TOKEN_BYTES = 2 * 32 * 4  # a key and a value of one head in fp32


@pytest.fixture(scope="module")
def profile(h200_profile):
    hardware = replace(h200_profile.hardware, element_bytes=4, num_sms=1)
    return replace(h200_profile, hardware=hardware, asynchronous=False)


@pytest.fixture(scope="module")
def model(profile):
    return RandomModel.build(SHAPE, CPU, Machine.of(profile))


@pytest.fixture
def plan_of(model):
    """A preset whose target reads BUDGET tokens, with all layers on the host."""

    def make(name, **changes):
        plan = preset(name, Workload("random", "here", CONTEXT, 64, 2))
        attention = replace(plan.attention, budget=BUDGET)
        return replace(plan, attention=attention, placement=Placement(True, BUDGET, memory_bytes=10**6, **changes))

    return make


@pytest.mark.parametrize("fresh", [0, 8, CHOSEN])
def test_steps_choose_so_many_tokens_anew(model, plan_of, fresh):
    """Every row and head of every layer loads just these, once the first step has loaded all."""
    plan = plan_of("specontext")
    cache = DriftingCache(model, plan)
    cache.drift(fresh)
    _, moved = loading_ms(cache, plan, CHOSEN)
    assert moved == SHAPE.layers * 2 * 2 * fresh * TOKEN_BYTES


def test_one_set_for_all_heads_moves_as_much(model, plan_of):
    plan = plan_of("specontext")
    plan = replace(plan, attention=replace(plan.attention, selection=RetrievalHead(level="batch")))
    cache = DriftingCache(model, plan)
    cache.drift(8)
    assert loading_ms(cache, plan, CHOSEN)[1] == SHAPE.layers * 2 * 2 * 8 * TOKEN_BYTES


@pytest.mark.parametrize("name", ["specontext", "specontext-two-bit"])
@pytest.mark.parametrize("elastic", [True, False])
def test_rounds_with_and_without_elastic_loading(model, plan_of, profile, name, elastic, monkeypatch):
    monkeypatch.setattr(random_model, "is_busy", lambda spread: False)  # whatever else runs here
    figures = elastic_round(model, plan_of(name, elastic=elastic), profile)
    assert figures["host_layers"] == SHAPE.layers
    for overlap in OVERLAPS if elastic else (0.0,):
        row = figures[f"overlap {overlap:g}"]
        assert row["tpot_ms"] > 0 and row["loads_alone_ms"] > 0
        loaded = SHAPE.layers * 2 * 2 * round((1 - overlap) * CHOSEN) * TOKEN_BYTES
        assert row["loaded_mb"] == pytest.approx(loaded / 1e6)
        assert (row["hidden_share"] is None) != elastic
