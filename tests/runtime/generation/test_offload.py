"""Generation with layers whose codes lie on the host: the same tokens as with all of them on the device."""

import functools
from dataclasses import replace

import pytest
from grids import pairs

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import HostPart, Placement
from ridgeplan.runtime import buffers
from ridgeplan.runtime.errors import WorkloadError

LENGTHS, NEW = [120, 90, 57], 42  # with groups of 32: two flushes of every row
LAYERS = 5


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS).folder


@pytest.fixture(scope="module")
def shape(folder, shape_of):
    return shape_of(folder)


@pytest.fixture(scope="module")
def without_limit(folder, make_plan, prompts):
    """What a plan generates with all layers on the device, generated once."""

    @functools.cache
    def run(kv, gamma):
        return runtime.load(make_plan(kv, gamma, batch=3), folder, device="cpu").generate(prompts(*LENGTHS), NEW)

    return run


@pytest.mark.parametrize("prefetch", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part, layers, gamma", pairs([*HostPart], [(1, 4), (LAYERS, 0), (LAYERS, 4), (1, 0)]))
def test_the_same_tokens_as_without_a_limit(
    layers, part, gamma, prefetch, folder, shape, limited, make_plan, prompts, without_limit
):
    plan, ids, expected = make_plan("int4x2", gamma, batch=3), prompts(*LENGTHS), without_limit("int4x2", gamma)
    placed, host_layers = limited(plan, shape, layers, part, prefetch=prefetch)
    engine = runtime.load(placed, folder, device="cpu")
    assert engine.cache.config.host_layers == host_layers
    generation = engine.generate(ids, NEW)
    assert generation.tokens == expected.tokens
    assert generation.statistics.flushes == expected.statistics.flushes > 0
    assert gamma == 0 or generation.statistics.accepted > 0


SPARSE = {"ratio": 0.3, "floor": 40, "sinks": 2}


@pytest.mark.parametrize(
    "gamma, changes",
    [
        (0, {}),
        pytest.param(3, {"draft_bits": 4}, marks=pytest.mark.slow),
        pytest.param(3, {"selection": "streamingllm", **SPARSE}, marks=pytest.mark.slow),
        (3, {"selection": "quest", "page": 16, **SPARSE}),
        (3, {"selection": "specattn", **SPARSE}),
    ],
    ids=lambda value: value.get("selection", "all") if isinstance(value, dict) else None,
)
def test_full_precision_layers_too(gamma, changes, folder, shape, limited, make_plan, prompts):
    """Verification streams their old tokens; drafts read the latest ones, or have what they choose loaded."""
    plan, ids = make_plan("bf16", gamma, batch=2, new_tokens=96, **changes), prompts(120, 57)
    expected = runtime.load(plan, folder, device="cpu").generate(ids, 24)
    placed, host_layers = limited(plan, shape, 1, HostPart.ALL, budget=128)
    engine = runtime.load(placed, folder, device="cpu")
    assert engine.cache.config.host_layers == host_layers
    generation = engine.generate(ids, 24)
    assert generation.tokens == expected.tokens
    assert gamma == 0 or generation.statistics.accepted > 0


@pytest.mark.parametrize("kv, gamma", [pytest.param("int4x2", 3, marks=pytest.mark.slow), ("int8", 0)])
def test_layers_leave_while_tokens_are_generated(kv, gamma, folder, shape, limited, make_plan, prompts):
    """From a prompt for which all fit to a length where few do, layers leave one by one, and no token differs."""
    plan, ids = make_plan(kv, gamma, batch=2, context=64, new_tokens=160), prompts(60, 37)
    expected = runtime.load(plan, folder, device="cpu").generate(ids, 160)
    placed, _ = limited(plan, shape, 4, HostPart.ALL, adaptive=True)
    engine = runtime.load(placed, folder, device="cpu")
    engine._first_use_tokens = 32  # as on a GPU
    generation = engine.generate(ids, 160)
    assert generation.tokens == expected.tokens
    assert engine.statistics.moved_layers > 1
    assert engine.cache.first_on_host == LAYERS - engine.statistics.moved_layers
    again = engine.generate(ids[::-1], 70)
    assert again.tokens == [tokens[:70] for tokens in expected.tokens[::-1]]


def test_what_steps_have_in_common_is_not_loaded_again(folder, shape, limited, make_plan, prompts):
    """Drafts that choose half of the tokens of layers on the host mostly find them there (SpeContext, Fig 6b)."""
    plan = make_plan("bf16", 3, batch=2, selection="streamingllm", ratio=0.5, floor=40, sinks=2)
    placed, host_layers = limited(plan, shape, 1, HostPart.ALL, budget=128)
    statistics = runtime.load(placed, folder, device="cpu").generate(prompts(100, 60), 60).statistics
    assert host_layers > 0
    assert 0 < statistics.loads < statistics.wanted_loads
    assert statistics.overlap == 1 - statistics.loads / statistics.wanted_loads > 0.8


def test_without_pinned_memory_one_line_says_so_and_nothing_is_left_behind(
    folder, shape, limited, make_plan, prompts, monkeypatch
):
    placed, _ = limited(make_plan("int4x2", 2, batch=2), shape, 1, HostPart.ALL)
    with monkeypatch.context() as patched:
        patched.setattr(buffers, "available_bytes", lambda: 1000)
        with pytest.raises(WorkloadError, match=r"GB of pinned host memory and 0\.0 GB are free") as refused:
            runtime.load(placed, folder, device="cpu")
        assert "\n" not in str(refused.value)
    assert runtime.load(placed, folder, device="cpu").generate(prompts(50, 20), 5).statistics.generated == 10


def test_a_prompt_beyond_what_fits_with_all_layers_away_is_refused(folder, make_plan):
    plan = make_plan("int4x2", 2, context=512)
    placement = replace(plan, placement=Placement(True, 64, memory_bytes=10**5))
    with pytest.raises(WorkloadError, match=r"the plan needs .* may be used"):
        runtime.load(placement, folder, device="cpu")


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_abandoned_generation_disturbs_no_later_one(adaptive, folder, shape, limited, make_plan, prompts):
    plan, ids = make_plan("int4x2", 3, batch=2, context=64, new_tokens=130), prompts(60, 37)
    placed, _ = limited(plan, shape, 2, HostPart.ALL, adaptive=adaptive)
    engine = runtime.load(placed, folder, device="cpu")
    expected = engine.generate(ids, 70).tokens
    steps = engine.stream_batch(ids, 130)
    for _ in range(20):
        next(steps)
    steps.close()
    assert engine.generate(ids, 70).tokens == expected
