"""Targets that read a selection of layers whose KV lies on the host: the same tokens as with all KV on the device."""

from dataclasses import replace

import pytest

from ridgeplan import runtime
from ridgeplan.planner.axes.offload import HostPart
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model_config import decoder_config

LENGTHS, NEW = [128, 70, 37], 90  # with groups of 32: two or three flushes a row
LAYERS, BUDGET = 6, 64
SELECTIONS = {
    "retrieval-head": {},
    "progressive": {},
    "streamingllm": {},
    "quest": {},
    "clusterkv": {"cluster": 8},
    "shadowkv": {"outliers": 1},
}
# 2-bit keys are those of codes, which a bf16 cache has none of.
CASES = [("bf16+int4" if name == "progressive" else "bf16", name) for name in SELECTIONS]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def shape(model):
    return decoder_config(load_config(model.folder), model.folder, 1.0).shape


@pytest.fixture(scope="module")
def engines(model, shape, make_plan, limited, head_file):
    """An engine without a limit, and one with layers on the host."""
    path = head_file(model)

    def make(kv, name, gamma=0, batch=3, layers=1, budget=BUDGET, prefetch=1, elastic=True):
        own = SELECTIONS[name] | {"sinks": 2}
        drafts = {"selection": name, "ratio": 0.2, "floor": 48, **own} if gamma else {}
        codes = "full" if gamma else None
        plan = make_plan(
            kv, gamma, batch=batch, codes=codes, target=name, target_budget=BUDGET, target_options=own, **drafts
        )
        placed, host_layers = limited(
            plan, shape, layers, HostPart.ALL, budget=budget, prefetch=prefetch, elastic=elastic
        )
        head = path if name == "retrieval-head" else None
        roomy = replace(placed, placement=replace(placed.placement, memory_bytes=0))
        plain, offloaded = (
            runtime.load(one, model.folder, device="cpu", retrieval_head=head) for one in (roomy, placed)
        )
        assert plain.cache.config.host_layers == 0
        assert offloaded.cache.config.host_layers == host_layers > 0
        return plain, offloaded

    return make


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("kv, name", CASES)
def test_the_same_tokens_as_without_a_limit(kv, name, gamma, engines, prompts):
    plain, offloaded = engines(kv, name, gamma)
    for ids in (prompts(*LENGTHS), prompts(30, 99, 64)):
        found = offloaded.generate(ids, NEW)
        assert found.tokens == plain.generate(ids, NEW).tokens
        assert gamma == 0 or found.statistics.accepted > 0
        assert found.statistics.wanted_loads > found.statistics.loads > 0
