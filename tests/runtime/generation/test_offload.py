"""Generation with layers whose codes lie on the host: the same tokens as with all of them on the device."""

from dataclasses import replace

import pytest

from ridgeplan import runtime
from ridgeplan.planner.axes.offload import HostPart
from ridgeplan.planner.capacity import offloaded_layers, peak_bytes
from ridgeplan.planner.plan import Placement
from ridgeplan.roofline.device import Device
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model_config import decoder_config

LENGTHS, NEW = [128, 70, 37], 90
LAYERS = 6


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(agreeable=True, num_hidden_layers=LAYERS).folder


@pytest.fixture(scope="module")
def shape(folder):
    return decoder_config(load_config(folder), folder, 1.0).shape


def limited(plan, shape, layers, part, budget=64, **placement):
    """The plan with so little memory that at least `layers` layers must leave, and their number.

    Slots for the layers on their way take the memory of two or more.
    """
    whole = Placement(True, budget if part is HostPart.ALL else 0, part, **placement)
    most = int(peak_bytes(plan, shape, device(10**12)))
    for memory_bytes in range(most, 0, -most // 100):
        placed = replace(plan, placement=replace(whole, memory_bytes=memory_bytes))
        found, _ = offloaded_layers(placed, shape, device(memory_bytes))
        if found >= layers:
            return placed, found
    raise AssertionError(f"no limit offloads {layers} layers")


def device(memory_bytes):
    return Device(memory_bytes=memory_bytes, element_bytes=4, num_sms=1, asynchronous=0)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("kv, gamma", [("int4x2", 4), ("int4x2", 0)])
@pytest.mark.parametrize("part", list(HostPart))
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_the_same_tokens_as_without_a_limit(layers, part, kv, gamma, prefetch, folder, shape, make_plan, prompts):
    plan, ids = make_plan(kv, gamma, batch=3), prompts(*LENGTHS)
    expected = runtime.load(plan, folder).generate(ids, NEW)
    placed, host_layers = limited(plan, shape, layers, part, prefetch=prefetch)
    engine = runtime.load(placed, folder)
    assert engine.cache.config.host_layers == host_layers
    found = engine.generate(ids, NEW)
    assert found.tokens == expected.tokens
    assert found.statistics.flushes == expected.statistics.flushes > 0
    assert gamma == 0 or found.statistics.accepted > 0


SPARSE = {"ratio": 0.3, "floor": 40, "sinks": 2}


@pytest.mark.parametrize(
    "gamma, changes",
    [
        (0, {}),
        (3, {"draft_bits": 4}),
        (3, {"selection": "streamingllm", **SPARSE}),
        (3, {"selection": "quest", "page": 16, **SPARSE}),
        (3, {"selection": "specattn", **SPARSE}),
    ],
    ids=lambda value: value.get("selection", "all") if isinstance(value, dict) else None,
)
def test_full_precision_layers_too(gamma, changes, folder, shape, make_plan, prompts):
    """Verification streams their old tokens; drafts read the latest ones, or have what they choose loaded."""
    plan, ids = make_plan("bf16", gamma, batch=2, new_tokens=96, **changes), prompts(100, 37)
    expected = runtime.load(plan, folder).generate(ids, 70)
    placed, host_layers = limited(plan, shape, 1, HostPart.ALL, budget=128)
    engine = runtime.load(placed, folder)
    assert engine.cache.config.host_layers == host_layers
    found = engine.generate(ids, 70)
    assert found.tokens == expected.tokens
    assert gamma == 0 or found.statistics.accepted > 0


@pytest.mark.parametrize("kv, gamma", [("int4x2", 3), ("int8", 0)])
def test_layers_leave_while_tokens_are_generated(kv, gamma, folder, shape, make_plan, prompts):
    """From a prompt for which all fit to a length where few do, layers leave one by one, and no token differs."""
    plan, ids = make_plan(kv, gamma, batch=2, context=64, new_tokens=400), prompts(60, 37)
    expected = runtime.load(plan, folder).generate(ids, 400)
    placed, _ = limited(plan, shape, 4, HostPart.ALL, adaptive=True)
    engine = runtime.load(placed, folder)
    found = engine.generate(ids, 400)
    assert found.tokens == expected.tokens
    assert engine.statistics.moved_layers > 1
    assert engine.cache.first_on_host == LAYERS - engine.statistics.moved_layers
    again = engine.generate(ids[::-1], 100)
    assert again.tokens == [tokens[:100] for tokens in expected.tokens[::-1]]
