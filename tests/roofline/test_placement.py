"""What leaves the device, when, and what it costs."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.plan import KVCache, KVFormat, Placement, Plan, Workload
from ridgeplan.planner.presets import preset
from ridgeplan.planner.sweeps import thresholds
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import prefill_seconds
from ridgeplan.roofline.execution import DRAFT_SWAP_PROMPT_TOKENS
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import full_kv
from ridgeplan.roofline.placement import (
    MAX_LENGTH,
    offload_layers,
    offload_thresholds,
    resident_memory,
    swapped_bytes,
)

LIMIT = 24e9


@pytest.fixture(scope="module")
def shape():
    return load_shape("Llama-3.1-8B")


@pytest.fixture(scope="module")
def small(h200_profile):
    """The test machine with 24 GB."""
    return replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=int(LIMIT)))


def placed(plan, shape, profile):
    machine = Machine.of(profile)
    return offload_layers(shape, machine, strategy_of(plan, shape, machine, 0.9))


def offloading(context):
    return Plan(Workload("m", "h200", context, new_tokens=1), placement=Placement(True, 2048))


def test_nothing_leaves_while_everything_fits(shape, small):
    found = placed(offloading(16384), shape, small)
    assert (found.offloaded_layers, found.transfer_s) == (0, 0)


def test_just_enough_layers_leave(shape, small):
    found = placed(offloading(65536), shape, small)
    assert 0 < found.offloaded_layers < 32
    assert found.memory.peak <= LIMIT
    one_layer = 65536 * 2 * 8 * 128 * 2
    assert found.memory.peak + one_layer > LIMIT


def test_without_a_selection_a_whole_layer_travels_and_with_one_the_changed_budget(shape, small):
    whole = placed(offloading(65536), shape, small)
    selected = placed(preset("specontext", Workload("m", "h200", 65536, new_tokens=1)), shape, small)
    per_layer = [one.transfer_s / one.offloaded_layers for one in (whole, selected)]
    link = small.hardware.host_link_bytes_per_s
    assert per_layer[0] == pytest.approx(65536 * 4096 / link, rel=1e-3)
    assert per_layer[1] == pytest.approx(0.1 * 2048 * 4096 / link, rel=1e-3)


def test_offloaded_codes_travel_as_codes(shape, small):
    whole = placed(offloading(131072), shape, small)
    codes = placed(replace(offloading(131072), kv=KVCache(KVFormat.INT8)), shape, small)
    per_layer = [one.transfer_s / one.offloaded_layers for one in (whole, codes)]
    assert per_layer[1] / per_layer[0] == pytest.approx(1.03125 / 2, rel=1e-3)


def test_thresholds_agree_with_the_placement_at_every_length(shape, small):
    plan = offloading(1000)
    lengths = thresholds(plan, shape, small)
    assert list(lengths) == sorted(lengths)
    for cpu_layers in (0, 7, 20):
        for length, layers in ((lengths[cpu_layers] + 1, cpu_layers), (lengths[cpu_layers] + 3, cpu_layers + 1)):
            held = replace(plan, workload=replace(plan.workload, context=length - 1))
            assert placed(held, shape, small).offloaded_layers == layers


def test_thresholds_of_a_model_that_does_not_fit_are_zero(shape, h200_profile):
    tiny = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**9))
    assert set(thresholds(offloading(1000), shape, tiny)) == {0}


LONG = 131072
BUFFERS = 2 * (2**30 + 2**28)  # hidden states, queries, and a layer's KV of a prompt of LONG tokens


@pytest.fixture(scope="module")
def machine(h200_profile):
    return Machine.of(h200_profile)


def strategy(name, machine, shape, context=LONG, **changes):
    return strategy_of(preset(name, Workload("m", "h200", context, **changes)), shape, machine, 0.9)


def test_drafts_lend_a_long_prompt_their_memory(shape, machine):
    plain, drafted = (
        resident_memory(shape, machine, strategy(n, machine, shape)) for n in ("autoregressive", "quantspec")
    )
    assert plain.prefill_workspace - drafted.prefill_workspace == BUFFERS
    assert drafted.prefill_peak == drafted.resident + drafted.prefill_workspace
    # Without lending it is 25%: the 4-bit copy of the weights takes back half of what the INT8 cache saves.
    assert plain.peak - drafted.peak > 0.3 * full_kv(shape, 1, LONG, 2)


@pytest.mark.parametrize(
    "name, context, changes",
    [
        ("autoregressive", LONG, {}),
        ("quantspec-kv", LONG, {}),  # drafts on the target's weights
        ("quantspec", DRAFT_SWAP_PROMPT_TOKENS - 1, {}),
        ("quantspec", LONG, {"asynchronous": 0}),  # a CPU
    ],
)
def test_nothing_is_lent_where_there_is_nothing_to_lend_or_to_gain(name, context, changes, shape, machine):
    machine = replace(machine, **changes)
    assert swapped_bytes(shape, machine, strategy(name, machine, shape, context)) == 0


def test_weights_come_back_over_the_link_once_a_request(shape, machine):
    for batch in (1, 4):
        drafted, exact = (strategy(name, machine, shape, batch=batch) for name in ("quantspec", "quantspec-kv"))
        more_s = prefill_seconds(shape, machine, drafted) - prefill_seconds(shape, machine, exact)
        assert more_s == pytest.approx(BUFFERS / machine.host_link_bytes_per_s, rel=1e-6)


def test_thresholds_look_beyond_the_step_where_lending_begins(shape, machine):
    """Just before it a prompt takes 1.3 GB more, so that a length may fit though a shorter one does not."""
    held = strategy("quantspec", machine, shape)

    def peak(context):
        return resident_memory(shape, machine, replace(held, context=context, new_tokens=0)).peak

    before, after = peak(DRAFT_SWAP_PROMPT_TOKENS - 1), peak(DRAFT_SWAP_PROMPT_TOKENS)
    assert before - after > 1e9
    for limit in (after - 1, after, before - 1, before, before + 1e9):
        [longest, *_] = offload_thresholds(shape, replace(machine, memory_bytes=limit), held)
        fitting = [tokens for tokens in (longest, longest + 1) if peak(tokens) <= limit]
        assert fitting == [longest]
        assert (longest >= DRAFT_SWAP_PROMPT_TOKENS) == (limit >= after)
        assert longest < MAX_LENGTH
