"""Layers that leave while a target reads a selection: SpeContext's three parts in one generation (sections 4 to 6)."""

from dataclasses import replace

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.planner.capacity import departure_lengths
from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import HostPart
from ridgeplan.runtime.offload.layer_mover import LayerMover

LAYERS, CONTEXT, NEW, BUDGET, GROUP = 4, 64, 150, 64, 32
PROMPTS = 60, 37
CASES = {
    "retrieval-head": {},
    "streamingllm": {"sinks": 2},
    "quest": {"keep_generated": False},  # generated tokens would not fit the slots
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def shape(model, shape_of):
    return shape_of(model.folder)


@pytest.fixture
def device_of():
    """The device that a plan with a limit of memory runs on here."""
    return lambda plan: Device(
        memory_bytes=plan.placement.memory_bytes, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0
    )


@pytest.fixture(scope="module")
def run(model, head_file, prompts):
    """A generation of a plan, and the engine that ran it; each of them once."""
    path, known = head_file(model), {}

    def generate(plan, *lengths):
        name = f"{plan} {lengths}"
        if name not in known:
            known[name] = generate_anew(plan, *lengths)
        return known[name]

    def generate_anew(plan, *lengths):
        head = path if plan.attention.selection.name == "retrieval-head" else None
        engine = runtime.load(plan, model.folder, device="cpu", retrieval_head=head)
        return engine.generate(prompts(*lengths), NEW), engine

    return generate


@pytest.fixture(scope="module")
def placed(shape, make_plan, limited):
    """A plan with so little memory that all layers fit its prompt, and few of them the text's end."""

    def make(kv, name, gamma=0, **placement):
        target = {"target": name, "target_budget": BUDGET, "target_options": CASES[name]} if name != "all" else {}
        drafts = {"selection": name, "ratio": 0.2, "floor": 48, **CASES[name]} if gamma else {}
        plan = make_plan(kv, gamma, context=CONTEXT, new_tokens=NEW, batch=2, **target, **drafts)
        options = {"budget": BUDGET, "adaptive": True} | placement
        return limited(plan, shape, 3, HostPart.ALL, **options)[0]

    return make


def without_limit(plan):
    return replace(plan, placement=replace(plan.placement, memory_bytes=0))


RUNS = [
    ("bf16", "retrieval-head", 1),
    ("bf16", "all", 0),
    pytest.param("int8", "streamingllm", 0, marks=pytest.mark.slow),
    ("int4x2", "retrieval-head", 0),
    pytest.param("bf16", "quest", 0, marks=pytest.mark.slow),
    pytest.param("bf16", "retrieval-head", 0, marks=pytest.mark.slow),
    pytest.param("bf16", "streamingllm", 0, marks=pytest.mark.slow),
    pytest.param("int8", "retrieval-head", 0, marks=pytest.mark.slow),
    pytest.param("int8", "quest", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kv, name, gamma", RUNS)
def test_the_same_tokens_as_without_a_limit(kv, name, gamma, run, placed):
    plan = placed(kv, name, gamma)
    (result, engine), (expected, roomy) = run(plan, *PROMPTS), run(without_limit(plan), *PROMPTS)
    assert result.tokens == expected.tokens
    assert roomy.cache.config.host_layers == 0
    assert result.statistics.host_layers == result.statistics.moved_layers >= 2
    assert engine.cache.config.host_layers >= 3  # the last may fit until the very end
    assert gamma == 0 or result.statistics.accepted > 0
    assert name == "all" or 0 < result.statistics.loads < result.statistics.wanted_loads


def test_layers_leave_at_the_steps_that_algorithm_2_names(run, placed, device_of, shape):
    """Before the pass whose length reaches S_i, the largest that i layers on the host leave room for (Eq 7)."""
    plan = placed("bf16", "retrieval-head")
    result, engine = run(plan, *PROMPTS)
    memory, slots = engine.cache.movable.slots, BUDGET + 2 * GROUP + 1
    thresholds = [(memory - i * slots) // (LAYERS - i) for i in range(engine.cache.config.host_layers)]
    assert thresholds == sorted(thresholds)
    assert max(PROMPTS) < thresholds[0]
    last = max(PROMPTS) + NEW - 2  # tokens before the last pass
    assert list(result.statistics.moved_at) == [length for length in thresholds if length <= last]
    assert departure_lengths(plan, shape, device_of(plan)) == tuple(thresholds)  # as they are priced


def test_layers_of_codes_leave_at_the_lengths_that_are_priced(run, placed, device_of, shape):
    plan = placed("int8", "retrieval-head")
    result, engine = run(plan, *PROMPTS)
    lengths = departure_lengths(plan, shape, device_of(plan))
    assert list(result.statistics.moved_at) == [length for length in lengths if length <= max(PROMPTS) + NEW - 2]
    assert result.statistics.moved_layers >= 2
    groups = engine.cache.movable.groups
    assert lengths == tuple((groups // (LAYERS - away) + 2) * GROUP - 1 for away in range(len(lengths)))


@pytest.mark.parametrize("beyond, away", [(-1, 1), (0, 2)])
def test_a_prompt_starts_with_the_layers_away_that_algorithm_2_names(beyond, away, run, placed):
    """Of a prompt one token short of S_1 one layer is away, of one as long two."""
    _, engine = run(placed("bf16", "retrieval-head"), 60)
    LayerMover(engine.cache).start(engine.statistics.moved_at[1] + beyond)
    assert LAYERS - engine.cache.first_on_host == away


def test_what_is_moved_is_what_is_predicted(run, placed):
    """Every step after the first layer has left asks each one for the budget that recent tokens leave it."""
    plan = placed("bf16", "retrieval-head")
    result, engine = run(plan, 60)
    statistics = result.statistics
    expected = 0
    for length in range(60, 60 + NEW - 1):  # a step's query sees itself, too
        old = quantized_groups(length, GROUP) * GROUP
        chosen = min(max(BUDGET - (length - old), 4), old)
        expected += sum(length >= left for left in statistics.moved_at) * chosen * engine.cache.kv_heads
    assert statistics.wanted_loads == expected
    assert 0 < statistics.loads < expected
