"""Time of layers on the host: counted by hand, and against a simulation of the pipeline event by event."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.execution import HOST_PAGE_BYTES
from ridgeplan.roofline.host_link import (
    GATHER_LINK_SHARE,
    HELD_UP_BY_KERNELS,
    HELD_UP_BY_PAGE_WALKS,
    HELD_UP_BY_TRANSFERS,
    HOST_LAYER_KERNELS,
    HostLink,
    pages_of,
)
from ridgeplan.roofline.latency import RateTerms
from ridgeplan.roofline.memory import NO_LAYERS, Departures, HostLayers
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.policies.selections import Quest, RetrievalHead
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import round_at, round_rates

SHAPE = load_shape("Llama-3.1-8B")
TOKEN_BYTES = 4096  # of a layer of the 8B shape in bf16
LINK = 1e10 * GATHER_LINK_SHARE  # bytes a second that gathers from the host move over the ideal machine's link
OLD = 2048 - 192  # of 2048 tokens that a step reads, those that are not the latest one and a half groups


def strategy(name, machine, **changes):
    workload = Workload("Llama-3.1-8B", "h200", 65536)
    return strategy_of(preset(name, workload), SHAPE, machine, 0.9).with_terms(**changes)


def test_a_stream_copies_all_old_tokens(ideal):
    """Of 65536 tokens the latest 192, one and a half groups, are on the device; the ideal link moves 10 GB/s."""
    streamed = HostLink(SHAPE, ideal, strategy("autoregressive", ideal), HostLayers(5, TOKEN_BYTES)).stream_seconds(
        65536
    )
    assert streamed == pytest.approx((65536 - 192) * TOKEN_BYTES / 1e10)


def test_loads_are_what_the_last_step_did_not_choose(ideal):
    """Pieces of 512 bytes, of 4 KB a token, in 4096 pages: 512 tokens are as many pieces of 8 heads, 4096 draws."""
    held, host = strategy("specontext", ideal, offload_overlap=0.75), HostLayers(5, TOKEN_BYTES)
    drawn = 4096 * (1 - (1 - 1 / 4096) ** 4096)
    copied_s = 512 * TOKEN_BYTES / LINK
    assert HostLink(SHAPE, ideal, held, host).load_seconds(65536, 2048, 1) == pytest.approx(
        (drawn * 512 / 1e10, copied_s)
    )
    slow = replace(ideal, link_rates={"host_gather": RateTerms(0.25, 1.0, 0.0)})
    assert HostLink(SHAPE, slow, held, host).load_seconds(65536, 2048, 1) == pytest.approx(
        (drawn * 512 / 0.25e10, copied_s)
    )
    narrow = replace(SHAPE, head_dim=32)  # four times the pieces
    more = 4096 * (1 - (1 - 1 / 4096) ** (4 * 4096))
    assert HostLink(narrow, slow, held, host).load_seconds(65536, 2048, 1) == pytest.approx(
        (more * 512 / 0.25e10, copied_s)
    )
    aligned = 4096 * (1 - (1 - 1 / 4096) ** 256)  # 16 tokens of a head lie in a page
    assert HostLink(SHAPE, slow, held, host).load_seconds(65536, 2048, 16)[0] == pytest.approx(aligned * 512 / 0.25e10)


def test_loads_of_everything_walk_to_every_page_once():
    """Few pieces lie in a page each, many share pages, and pieces beyond a page have several."""
    held = 1000 * HOST_PAGE_BYTES
    assert pages_of(1, 512, held) == pytest.approx(1)
    assert pages_of(10, 512, held) == pytest.approx(10, rel=0.01)
    assert pages_of(10**6, 512, held) == pytest.approx(1000)
    assert pages_of(2, 4 * HOST_PAGE_BYTES, held) == pytest.approx(8, rel=0.01)
    assert pages_of(0, 512, held) == 0


def test_calibrated_classes_of_the_link_replace_the_datasheet(ideal):
    calibrated = replace(ideal, link_rates={"host_copy": RateTerms(0.5, 1.0, 1e-5)})
    held, host = strategy("autoregressive", ideal), HostLayers(5, TOKEN_BYTES)
    plain, slow = (HostLink(SHAPE, machine, held, host).stream_seconds(65536) for machine in (ideal, calibrated))
    assert slow == pytest.approx(2 * plain + 1e-5)
    assert HostLink(SHAPE, calibrated, held, host).prompt_seconds() == pytest.approx(5 * 65536 * TOKEN_BYTES / 1e10)


def simulated(layers, on_host, layer_s, copy_s, slots, drafts_s):
    """Duration of a pass after drafts; copies begin with these, and need one of `slots` free slots."""
    copied, computed, link, end = [], [], 0.0, drafts_s
    for number in range(layers):
        host = number - (layers - on_host)
        if host < 0:
            end += layer_s
            continue
        free = 0.0 if host < slots else computed[host - slots]
        link = max(link, free) + copy_s
        copied.append(link)
        end = max(end, copied[host]) + layer_s
        computed.append(end)
    return end - drafts_s


@pytest.mark.parametrize("drafts_s", [0.0, 1.1, 20.0])
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("on_host", [1, 5, 32])
@pytest.mark.parametrize("copy_s", [0.02, 0.1, 0.6, 3.0])
def test_the_pipeline_is_the_simulation_s_within_one_layer(copy_s, on_host, prefetch, drafts_s, ideal):
    held = strategy("autoregressive", ideal, offload_prefetch=prefetch)
    pass_s = 3.2
    predicted_s = HostLink(SHAPE, ideal, held, HostLayers(on_host, 1)).streamed_seconds(pass_s, copy_s, drafts_s)
    expected = simulated(32, on_host, pass_s / 32, copy_s, prefetch + 1, drafts_s)
    assert predicted_s == pytest.approx(expected, abs=pass_s / 32 + 1e-9)


def test_without_layers_on_the_host_a_pass_is_as_before(ideal):
    assert HostLink(SHAPE, ideal, strategy("autoregressive", ideal), NO_LAYERS).streamed_seconds(3.2, 1.0) == 3.2


def test_choices_made_in_a_layer_add_their_loads_and_those_known_ahead_hold_kernels_up(ideal):
    """All load the same tokens; those of a retrieval head are known before the first layer.

    Residency of 8 heads: two lists of 2048 tokens are read and two written, and the times of use of 2048 slots read;
    beside the layers before, where these choose for themselves.
    """
    host = HostLayers(20, TOKEN_BYTES)
    selections = {
        "quest": Quest(),
        "head": RetrievalHead(),
        "by layer": RetrievalHead(by_layer=True),
    }
    rounds = {}
    for name, selection in selections.items():
        plan = preset("specontext", Workload("Llama-3.1-8B", "h200", 65536))
        plan = replace(plan, attention=replace(plan.attention, selection=selection))
        held, rates = strategy_of(plan, SHAPE, ideal, 0.9), rates_of(plan, SHAPE, ideal)
        held = held.with_terms(
            offload_overlap=0.9, target_host_run_tokens=1 if name == "quest" else held.target.host_run_tokens
        )
        passes = round_rates(SHAPE, ideal, held, rates)
        near, far = (round_at(SHAPE, ideal, held, passes, 65536, layers) for layers in (NO_LAYERS, host))
        rounds[name] = far.verify_s - near.verify_s
    load_s, found_s = 0.1 * OLD * TOKEN_BYTES / LINK, 8 * 5 * 2048 * 4 / 1e12
    assert rounds["quest"] == pytest.approx(20 * (load_s + found_s))
    walked_s = 4096 * (1 - (1 - 1 / 4096) ** (0.1 * OLD * 8)) * 512 / 1e10
    held_up_s = 20 * max(HELD_UP_BY_PAGE_WALKS * walked_s, HELD_UP_BY_TRANSFERS * load_s)
    assert rounds["head"] == pytest.approx(held_up_s + found_s)
    assert rounds["by layer"] == pytest.approx(held_up_s)


def test_loads_that_take_longer_than_the_layers_are_waited_for(ideal):
    """2048 tokens of 32 layers at a link 100 times as slow: they follow one another, held up by the kernels."""
    plan = preset("specontext", Workload("Llama-3.1-8B", "h200", 65536))
    plan = replace(plan, attention=replace(plan.attention, selection=RetrievalHead(level="batch")))
    slow = replace(ideal, host_link_bytes_per_s=ideal.host_link_bytes_per_s / 100)
    held, rates = strategy_of(plan, SHAPE, slow, 0.9).with_terms(offload_overlap=0.9), rates_of(plan, SHAPE, slow)
    passes = round_rates(SHAPE, slow, held, rates)
    near, far = (
        round_at(SHAPE, slow, held, passes, 65536, layers) for layers in (NO_LAYERS, HostLayers(32, TOKEN_BYTES))
    )
    loads_s = 32 * 0.1 * OLD * TOKEN_BYTES / (LINK / 100)
    assert far.verify_s == pytest.approx(loads_s + HELD_UP_BY_KERNELS * near.verify_s, rel=0.01)


def test_a_layer_on_the_host_launches_small_kernels_whatever_it_loads(ideal):
    """Of 20 layers, at an overlap of 100%; 2 us each."""
    busy = replace(ideal, rates={**ideal.rates, "gather": RateTerms(1.0, 1.0, 2e-6)})
    held = strategy("specontext", ideal, offload_overlap=1.0)
    near, far = (
        HostLink(SHAPE, machine, held, HostLayers(20, TOKEN_BYTES)).target_seconds(65536, 0.032, 0.0, 0.0)
        for machine in (ideal, busy)
    )
    assert far - near == pytest.approx(20 * HOST_LAYER_KERNELS * 2e-6)


@pytest.mark.parametrize("name, loaded", [("specontext", 2048 - 192), ("quest", 2048 - 192), ("shadowkv", 2432 - 192)])
def test_recent_tokens_count_inside_the_budget_and_are_not_loaded(name, loaded, ideal):
    """The latest 192 on average, also of prompts; ShadowKV has 48 outlier chunks of 8 beside the budget."""
    held = strategy(name, ideal)
    for cached in (65536, 70000):
        assert held.target_loaded(cached) == loaded
    assert held.target_loaded(1000) == 1000 - 192
    assert held.target_loaded(100) == 0


def test_texts_of_recent_tokens_alone_load_nothing(ideal):
    link = HostLink(SHAPE, ideal, strategy("specontext", ideal), HostLayers(20, TOKEN_BYTES))
    assert link.load_seconds(100, 0, 1) == (0, 0)
    assert link.target_seconds(100, 0.032, 0.0, 0.0) == pytest.approx(0.032, rel=0.01)


def test_drafts_load_as_many_tokens_as_they_read(ideal):
    """At 1024 tokens a tenth would be 102; the floor is 256, of which the slots miss a tenth in each layer."""
    plan = preset("magicdec-quest", Workload("Llama-3.1-8B", "h200", 65536))
    held, rates = strategy_of(plan, SHAPE, ideal, 0.9), rates_of(plan, SHAPE, ideal)
    held = held.with_terms(context=1024, draft_ratio=0.1, draft_min_tokens=256, draft_loads=1, draft_host_run_tokens=1)
    held, passes = held.with_terms(offload_overlap=0.9, offload_budget=2048), round_rates(SHAPE, ideal, held, rates)
    near, far = (
        round_at(SHAPE, ideal, held, passes, 1024, layers) for layers in (NO_LAYERS, HostLayers(20, TOKEN_BYTES))
    )
    assert far.draft_s - near.draft_s == pytest.approx(20 * 0.1 * 256 * TOKEN_BYTES / LINK)


def last_load_s(first_s: float, on_host: int, layer_s: float, load_s: float, prefetch: int) -> float:
    """When the last load ends: the first ones start at once, each other one where a layer on the host is reached."""
    ends: list[float] = []
    reached: list[float] = []
    for layer in range(on_host):
        start = 0 if layer <= prefetch else reached[layer - prefetch - 1]
        ends.append(max(start, ends[-1] if ends else 0) + load_s)
        reached.append(max(ends[-1], reached[-1] + layer_s if reached else first_s))
    return ends[-1]


@pytest.mark.parametrize("load_ms", [1, 2, 6])
@pytest.mark.parametrize("on_host", [1, 4, 20, 32])
@pytest.mark.parametrize("prefetch", [1, 5, 8])
def test_loads_begin_as_many_layers_ahead_as_there_is_room_for(prefetch, on_host, load_ms, ideal):
    """Layers of 1 ms, so that with 20 of 32 on the host 12 are computed before one is reached."""
    plan = preset("specontext", Workload("Llama-3.1-8B", "h200", 65536))
    plan = replace(plan, attention=replace(plan.attention, selection=RetrievalHead(level="batch")))
    link_bytes_per_s = 0.1 * OLD * TOKEN_BYTES / (1e-3 * load_ms) / GATHER_LINK_SHARE
    slow = replace(ideal, host_link_bytes_per_s=link_bytes_per_s)
    held = strategy_of(plan, SHAPE, slow, 0.9).with_terms(offload_overlap=0.9, offload_prefetch=prefetch)
    link = HostLink(SHAPE, slow, held, HostLayers(on_host, TOKEN_BYTES))
    loaded_ms = last_load_s(32 - on_host, on_host, 1, load_ms, prefetch) + HELD_UP_BY_KERNELS * 32
    bound_ms = 32 + on_host * HELD_UP_BY_TRANSFERS * load_ms
    assert 1e3 * link.target_seconds(65536, 0.032, 0.0, 0.0) == pytest.approx(max(loaded_ms, bound_ms), abs=0.01)


def test_drafts_load_no_more_than_the_budget_of_slots_holds(ideal):
    """They choose 256 tokens, for 128 of which there are slots; those miss a tenth in each of 20 layers."""
    changes = {"draft_loads": 1, "draft_host_run_tokens": 1, "offload_overlap": 0.9, "offload_budget": 128}
    link = HostLink(SHAPE, ideal, strategy("magicdec-quest", ideal, **changes), HostLayers(20, TOKEN_BYTES))
    assert link.draft_seconds(1024, 256) == pytest.approx(20 * 0.1 * 128 * TOKEN_BYTES / LINK)


@pytest.mark.parametrize("context, left, earliest", [(60_000, 0, 61_440), (65_536, 2, 65_536)])
def test_layers_leave_between_the_first_threshold_and_the_end(ideal, context, left, earliest):
    """6 of 32 layers leave, where 30 of them with 65537 tokens each fit; a prompt may be beyond the threshold.

    32 layers fit up to 30/32 x 65537 = 61440.9 tokens with the one that a step adds, and 30 layers those of the longer
    prompt, so that 2 have left before its first step.
    """
    departures = Departures(
        adaptive=1, layers=32, final=6, memory_bytes=30 * 65_537 * TOKEN_BYTES, unit_bytes=TOKEN_BYTES, unit_tokens=1,
        host_bytes=0, queries=1, coded=0,
    )  # fmt: skip
    held = strategy("autoregressive", ideal, context=context, new_tokens=8192)
    seconds = HostLink(SHAPE, ideal, held, HostLayers(6, TOKEN_BYTES)).departure_seconds(departures)
    written_s = (earliest + context + 8192) / 2 * TOKEN_BYTES / 1e10
    assert seconds == pytest.approx((6 - left) * (written_s + 4 * departures.memory_bytes / 1e12))
