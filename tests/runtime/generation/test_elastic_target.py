"""Targets that read a selection of layers whose KV lies on the host: the same tokens as with all KV on the device."""

import gc
import weakref
from dataclasses import replace

import pytest
from grids import pairs

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import HostPart
from ridgeplan.runtime import buffers
from ridgeplan.runtime.errors import WorkloadError

LENGTHS, NEW = [150, 88, 55], 16  # with groups of 32: every row is flushed once
LAYERS, BUDGET = 3, 64
SELECTIONS = {
    "retrieval-head": {},
    "progressive": {},
    "streamingllm": {},
    "quest": {"keep_generated": False},
    "clusterkv": {"cluster": 8, "keep_generated": False},
    "shadowkv": {"outliers": 0, "keep_generated": False},
}
# 2-bit keys are those of codes, which a bf16 cache has none of.
CASES = [("bf16+int4" if name == "progressive" else "bf16", name) for name in SELECTIONS]
CODES = [("int8", name) for name in SELECTIONS if name != "progressive"]
# Every selection once; with drafts a shared head and a choice for every query. The rest of the grid is slow.
UNDRAFTED = [("int8" if name in ("quest", "shadowkv") else kv, name, 0) for kv, name in CASES]
DRAFTED = [("int8", "retrieval-head", 3), ("bf16", "quest", 3)]
SLOW = [(*case, 0) for case in CASES + CODES] + [(*case, 3) for case in CASES[:4]]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def shape(model, shape_of):
    return shape_of(model.folder)


@pytest.fixture(scope="module")
def load(model, head_file):
    path = head_file(model)

    def make(plan):
        head = path if plan.attention.selection.name == "retrieval-head" else None
        return runtime.load(plan, model.folder, device="cpu", retrieval_head=head)

    return make


@pytest.fixture(scope="module")
def plan_of(shape, make_plan, limited):
    """A plan with so little memory that layers leave; drafts choose as the target does, but fewer tokens."""

    def make(kv, name, gamma=0, layers=1, budget=BUDGET, options=None, **placement):
        options_of_target = SELECTIONS[name] | {"sinks": 2} | (options or {})
        target = {"target": name, "target_budget": BUDGET, "target_options": options_of_target}
        drafts = {"codes": "full", "selection": name, "ratio": 0.2, "floor": 48, **options_of_target} if gamma else {}
        plan = make_plan(kv, gamma, context=512, batch=3, **target, **drafts)
        return limited(plan, shape, layers, HostPart.ALL, budget, **placement)[0]

    return make


@pytest.mark.parametrize("kv, name, gamma", [("bf16", "quest", 0), ("int8", "clusterkv", 0), ("bf16", "shadowkv", 0)])
def test_generated_tokens_that_are_kept_stay_in_slots(kv, name, gamma, load, plan_of, expected, prompts):
    """With slots for the budget, the generated tokens and outliers; with fewer the plan is only estimated."""
    options = {"keep_generated": True, "outliers": 1} if name == "shadowkv" else {"keep_generated": True}
    needed = BUDGET + 128 + gamma + 32 + 8 * (name == "shadowkv")
    with pytest.raises(runtime.UnsupportedPlan, match=f"up to {needed} tokens of offloaded KV in slots for {BUDGET} "):
        load(plan_of(kv, name, gamma, options=options))
    plan = plan_of(kv, name, gamma, budget=needed, options=options)
    engine = load(plan)
    assert engine.cache.config.host_layers > 0
    assert engine.generate(prompts(*LENGTHS), 45).tokens == expected(plan, *LENGTHS, new=45)


@pytest.fixture(scope="module")
def expected(load, prompts):
    """What a plan generates with memory for all of its KV."""

    def run(plan, *lengths, new=NEW):
        engine = load(replace(plan, placement=replace(plan.placement, memory_bytes=0)))
        assert engine.cache.config.host_layers == 0
        return engine.generate(prompts(*lengths), new).tokens

    return run


@pytest.mark.parametrize(
    "kv, name, gamma",
    [
        *UNDRAFTED,
        *DRAFTED,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in UNDRAFTED + DRAFTED),
    ],
)
def test_the_same_tokens_as_without_a_limit(kv, name, gamma, load, plan_of, expected, prompts):
    plan = plan_of(kv, name, gamma)
    engine = load(plan)
    assert engine.cache.config.host_layers > 0
    generation = engine.generate(prompts(*LENGTHS), NEW)
    assert generation.tokens == expected(plan, *LENGTHS)
    assert gamma == 0 or generation.statistics.accepted > 0
    assert 0 < generation.statistics.loads < generation.statistics.wanted_loads
    again = engine.generate(prompts(30, 99), NEW)  # fewer rows, and what slots held is forgotten
    assert again.tokens == expected(plan, 30, 99)


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_head_that_chooses_by_layer_has_each_layer_load_its_own(gamma, model, head_file, plan_of, prompts):
    path, plan = head_file(model, LAYERS), plan_of("bf16", "retrieval-head", gamma, layers=2)
    offloaded, roomy = (
        runtime.load(plan_of_engine, model.folder, device="cpu", retrieval_head=path)
        for plan_of_engine in (plan, replace(plan, placement=replace(plan.placement, memory_bytes=0)))
    )
    generation, generated = (engine.generate(prompts(*LENGTHS), NEW) for engine in (offloaded, roomy))
    assert generation.tokens == generated.tokens
    assert not plan.attention.selection.by_layer
    assert offloaded.plan.attention.selection.by_layer  # what runs is what is priced
    assert 0 < generation.statistics.loads < generation.statistics.wanted_loads


@pytest.mark.parametrize(
    "placement, kv, name", pairs([{"layers": LAYERS}, {"prefetch": 8}, {"budget": 2 * BUDGET}], CASES[:2], 0), ids=str
)
def test_wherever_layers_are_and_however_far_loads_run_ahead(kv, name, placement, load, plan_of, expected, prompts):
    plan = plan_of(kv, name, 2, **placement)
    assert load(plan).generate(prompts(*LENGTHS), NEW).tokens == expected(plan, *LENGTHS)


@pytest.mark.parametrize("kv, name", CASES[:2])
def test_without_elastic_loading_every_step_loads_what_it_chooses(kv, name, load, plan_of, expected, prompts):
    plan = plan_of(kv, name, elastic=False)
    generation = load(plan).generate(prompts(*LENGTHS), NEW)
    assert generation.tokens == expected(plan, *LENGTHS)
    assert generation.statistics.loads == generation.statistics.wanted_loads > 0


@pytest.mark.parametrize("kv, name", CASES[:2])
def test_an_abandoned_generation_disturbs_no_later_one_and_nothing_is_kept(kv, name, load, plan_of, expected, prompts):
    plan = plan_of(kv, name, 2)
    engine = load(plan)
    steps = engine.stream_batch(prompts(90, 128, 50), NEW)
    for _ in range(5):
        next(steps)
    steps.close()
    assert engine.generate(prompts(*LENGTHS), NEW).tokens == expected(plan, *LENGTHS)
    held = [weakref.ref(part) for pair in engine.cache.stores[-1].on_host for part in pair]
    engine.close()
    gc.collect()
    assert held and not any(tensor() is not None for tensor in held)


def test_without_pinned_memory_one_line_says_so_and_nothing_is_left_behind(load, plan_of, prompts, monkeypatch):
    plan = plan_of("bf16+int4", "progressive")
    with monkeypatch.context() as patched:
        patched.setattr(buffers, "available_bytes", lambda: 1000)
        with pytest.raises(WorkloadError, match=r"^offloaded KV needs .* of pinned host memory and 0\.0 GB are free"):
            load(plan)
    assert load(plan).generate(prompts(50), 5).statistics.generated == 5
