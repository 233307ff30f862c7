"""Targets that read a selection of layers on the host of a CUDA device: graphs that load it, and without a limit."""

from dataclasses import replace

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import HostPart

pytestmark = pytest.mark.gpu
LAYERS, BUDGET = 6, 64
CASES = [("bf16", "retrieval-head"), ("bf16", "quest"), ("bf16", "streamingllm"), ("bf16+int4", "progressive")]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def shape(model, shape_of):
    return shape_of(model.folder)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("kv, name", CASES)
def test_the_same_tokens_as_without_a_limit(
    kv, name, gamma, elastic, model, shape, make_plan, limited, head_file, prompts
):
    target = {"target": name, "target_budget": BUDGET, "target_options": {"sinks": 2}}
    drafts = {"codes": "full", "selection": name, "ratio": 0.2, "floor": 48, "sinks": 2} if gamma else {}
    plan = make_plan(kv, gamma, context=512, batch=3, **target, **drafts)
    placed, host_layers = limited(plan, shape, 1, HostPart.ALL, budget=BUDGET, cuda=True, prefetch=3, elastic=elastic)
    head = head_file(model) if name == "retrieval-head" else None

    def load(one):
        return runtime.load(one, model.folder, device="cuda", dtype=torch.float32, retrieval_head=head)

    plain, offloaded = load(replace(placed, placement=replace(placed.placement, memory_bytes=0))), load(placed)
    assert plain.cache.config.host_layers == 0
    assert offloaded.cache.config.host_layers == host_layers > 0
    for ids in (prompts(128, 70, 37), prompts(30, 99, 64)):  # the second replays the graph of the first
        found = offloaded.generate(ids, 90)
        assert found.tokens == plain.generate(ids, 90).tokens
        assert 0 < found.statistics.loads <= found.statistics.wanted_loads
    steps = offloaded.stream_batch(prompts(128, 70, 37), 90)
    for _ in range(10):
        next(steps)
    steps.close()
    assert offloaded.generate(ids, 90).tokens == found.tokens


@pytest.mark.parametrize(("kv", "name"), [("bf16", None), ("int8", None), *CASES, ("bf16", "clusterkv")])
def test_forced_logits_of_a_graph_are_those_of_the_references(kv, name, model, make_plan, head_file, prompts):
    """Through flushes, twice, and with a generation between."""
    target = {"target": name, "target_budget": BUDGET, "target_options": {"sinks": 2}} if name else {}
    plan = make_plan(kv, context=512, batch=3, **target)
    head = head_file(model) if name == "retrieval-head" else None
    ids = prompts(128, 70, 37)
    after = [[(7 * row + 3 * step) % 60 for step in range(80)] for row in range(3)]
    reference, graphed = (
        runtime.load(plan, model.folder, device=device, dtype=torch.float32, retrieval_head=head)
        for device in ("cpu", "cuda")
    )
    expected = reference.forced_logits_batch(ids, after)
    for _ in range(2):
        assert torch.allclose(graphed.forced_logits_batch(ids, after).cpu(), expected, rtol=1e-3, atol=2e-3)
        assert graphed.generate(ids, 40).tokens == reference.generate(ids, 40).tokens
