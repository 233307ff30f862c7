"""Memory of whole strategies, which layers are offloaded, when, and what it costs: counted by hand."""

from dataclasses import replace

import pytest

from ridgeplan.planner.capacity import departure_lengths
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.planner.prediction import predict
from ridgeplan.planner.queries.sweep import thresholds
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import evaluate, prefill_seconds
from ridgeplan.roofline.execution import DRAFT_SWAP_PROMPT_TOKENS, MAX_TOKENS
from ridgeplan.roofline.host_link import HostLink
from ridgeplan.roofline.latency import Device, Machine
from ridgeplan.roofline.memory import (
    full_kv,
    offload_layers,
    offload_thresholds,
    prompt_buffers,
    resident_memory,
    swapped_bytes,
)
from ridgeplan.roofline.plan.plan import HostPart, KVCache, KVFormat, Placement, Plan, Speculation, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import round_at, round_rates

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


WEIGHTS = 2 * 8_030_261_248
DRAFT_WEIGHTS = 0.53125 * 7_504_658_432  # 4-bit copies of all linear layers and the head
TOKEN = 131_072  # bytes: keys and values of 8 heads x 128 in 32 layers, bf16
# Codes of a token: of each of 8 heads in 32 layers, 128 keys and values of 4 bits a plane, a scale and a minimum of
# every channel's keys per 128 tokens (128 x 4 / 128), and one of the values.
UPPER, BOTH = 32 * 8 * (2 * 64 + 8), 32 * 8 * (2 * 128 + 8)


@pytest.mark.parametrize(
    "name, draft_weights, kv, buffers",
    [
        ("autoregressive", 0, 2 * 5121 * TOKEN, 0),  # 4096 + 1024 tokens and a slot for the next
        ("quantspec-weights", DRAFT_WEIGHTS, 2 * 5125 * TOKEN, 0),  # 5 queries in a verification of gamma 4
        ("int8", 0, 2 * 5120 * BOTH, 2 * (2 * 128 + 1) * TOKEN),
        ("quantspec", DRAFT_WEIGHTS, 2 * 5120 * BOTH, 2 * (2 * 128 + 5) * TOKEN),
        ("quantspec-exact", DRAFT_WEIGHTS, 2 * (5125 * TOKEN + 5120 * UPPER), 0),
        ("snapkv", 0, 2 * (1024 + 1024 + 1) * TOKEN, 0),
    ],
)
def test_what_a_batch_of_two_keeps_for_the_whole_generation(shape, machine, name, draft_weights, kv, buffers):
    parts = resident_memory(shape, machine, strategy(name, machine, shape, 4096, batch=2))
    assert (parts.weights, parts.draft_weights, parts.kv, parts.buffers) == (WEIGHTS, draft_weights, kv, buffers)
    # cuBLAS's workspaces on Hopper: of prompts, and of verifications of 2 x 5 rows, too many for this package's head.
    assert parts.libraries == (2 if "quantspec" in name else 1) * 2**25
    assert parts.resident == WEIGHTS + draft_weights + kv + buffers + parts.libraries


def test_prompts_multiply_by_a_dense_copy_of_4_bit_weights_on_a_gpu(shape, machine):
    """Gate and up of a layer are 235 MB; of them 128 MiB at a time are copied, beside what they produce."""
    quantized, dense = (
        resident_memory(shape, machine, strategy(name, machine, shape, 4096))
        for name in ("int4-weights", "autoregressive")
    )
    produced = 4096 * 14_336 * 2  # of the activation, which comes after
    assert quantized.prefill_workspace - dense.prefill_workspace == 2**27 - produced
    others = 2 * 128_256 * 4096 + 65 * 4096  # input table, head, norms
    assert quantized.weights == 0.53125 * (WEIGHTS / 2 - others) + 2 * others
    cpu = replace(machine, asynchronous=0)
    on_cpu, dense_on_cpu = (
        resident_memory(shape, cpu, strategy(name, machine, shape, 4096)) for name in ("int4-weights", "autoregressive")
    )
    assert on_cpu.prefill_workspace == dense_on_cpu.prefill_workspace
    assert on_cpu.prefill_workspace < dense.prefill_workspace  # chunks of fewer tokens
    assert on_cpu.libraries == 0


@pytest.mark.parametrize(
    ("model", "name", "copied"),
    [
        ("Qwen/Qwen3-30B-A3B", "int8-weights", 128 * 2 * 768 * 2048 * 2),
        ("Qwen/Qwen3-30B-A3B", "autoregressive", 0),
        ("openai/gpt-oss-20b", "autoregressive", 32 * 2 * 2880 * 2880 * 2),  # in MXFP4 as they are stored
    ],
)
def test_grouped_products_of_experts_hold_sorted_rows_and_dense_copies(machine, model, name, copied):
    """Of each expert of 4096 tokens, beside its activation and output: input, gates and ups, or its output twice."""
    shape = load_shape(model)
    per_token, width = {2048: (8, 768), 2880: (4, 2880)}[shape.hidden]
    sizes = [
        resident_memory(shape, each, strategy(name, each, shape, 4096)).prefill_workspace
        for each in (replace(machine, grouped_experts=0), machine)
    ]
    assert sizes[1] - sizes[0] == 4096 * per_token * max(2 * width, shape.hidden) * 2 + copied


def test_grouped_products_take_up_to_8192_tokens_at_once(machine):
    """Beside the prompt's buffers nothing grows from there on."""
    shape = load_shape("Qwen/Qwen3-30B-A3B")
    pieces = [
        resident_memory(shape, machine, strategy("autoregressive", machine, shape, tokens)).prefill_workspace
        - sum(prompt_buffers(shape, tokens, 2))
        for tokens in (4096, 8192, 16384)
    ]
    assert 2 * pieces[0] == pieces[1] == pieces[2]


def test_partials_are_those_of_the_splits_that_the_device_chooses(shape, machine):
    """131072 tokens of one sequence on 132 SMs: 33 splits of 32 heads; on 4 cores, one."""
    rest = 5 * 128_256 * 2 + 4 * 14_336 * 2
    for num_sms, splits in ((132, 33), (4, 1)):
        device = Device(memory_bytes=0, element_bytes=2, num_sms=num_sms)
        held = resident_memory(shape, device, strategy("autoregressive", machine, shape))
        assert held.decode_workspace == rest + 32 * splits * 129 * 4


def test_nothing_leaves_while_everything_fits(shape, small):
    placement = placed(offloading(16384), shape, small)
    assert placement.host.layers == 0


def test_just_enough_layers_leave(shape, small):
    placement = placed(offloading(65536), shape, small)
    assert 0 < placement.host.layers < 32
    assert placement.memory.peak <= LIMIT
    one_layer = 65536 * 2 * 8 * 128 * 2
    assert placement.memory.peak + one_layer > LIMIT


def test_a_layer_that_leaves_keeps_its_budget(shape, small):
    """65536 + 1 tokens and one more slot of 4096 bytes a layer; slots stay for 2048 tokens, two groups and the next.

    And its share of a table of the slots of every token, for each of 8 KV heads: the 32 layers choose alike.
    """
    plan = preset("specontext", Workload("m", "h200", 65536, new_tokens=1))
    placement = placed(replace(plan, placement=replace(plan.placement, adaptive=False)), shape, small)
    layer_bytes = 65538 * 4096
    freed_bytes = layer_bytes - (2048 + 2 * 128 + 1) * 4096 - 65537 * 8 * 4 / 32
    assert placement.memory.kv == pytest.approx(32 * layer_bytes - placement.host.layers * freed_bytes)
    projections = 4096 * 128 * (32 + 8) * 2  # of the head's queries and keys
    held = 8 * (128 * 2 + 4) + 32 * 4  # its keys and scores, for each KV head, and logits of all heads
    assert placement.memory.buffers == 65537 * held + projections


def test_layers_chosen_from_by_2_bit_keys_keep_these_and_slots_for_every_query(shape, small):
    """A key of 128 channels takes 32 bytes, and 4 of scales; a round of 4 queries has slots for 4 x 2048 tokens.

    Codes of keys and values, and the latter by token, leave with the layer and go nowhere.
    """
    plan = preset("specontext-two-bit", Workload("m", "h200", 65536, new_tokens=1))
    drafts = replace(plan.attention.selection, floor=256)
    plan = replace(plan, speculation=Speculation(3, selection=drafts))
    placement, placed_plan = placed(plan, shape, small), placed(replace(plan, placement=Placement()), shape, small)
    tokens, heads = 65537, 8
    codes, by_token = tokens * heads * (2 * 64 + 8), tokens * heads * 64
    slots = (4 * 2048 + 2 * 128 + 4) * 4096 + tokens * heads * (4 + 4)  # with a table, and the keys' scales
    freed = (tokens + 4) * 4096 + codes + by_token - slots
    assert placed_plan.memory.peak - placement.memory.peak == pytest.approx(placement.host.layers * freed)
    assert placement.memory.peak <= LIMIT < placement.memory.peak + freed
    assert placement.host.token_bytes == pytest.approx(4096, rel=1e-4)


def test_layers_stay_where_their_slots_would_take_more_than_they_free(shape, small):
    """3072 tokens, and slots for 4 x 2048 of them."""
    plan = preset("specontext-two-bit", Workload("m", "h200", 3072, new_tokens=1, batch=40))
    plan = replace(plan, speculation=Speculation(3, selection=replace(plan.attention.selection, floor=256)))
    placement = placed(plan, shape, small)
    assert placement.host.layers == 0
    assert placement.memory.peak == placed(replace(plan, placement=Placement()), shape, small).memory.peak > LIMIT


def test_a_layer_that_is_streamed_keeps_nothing_and_takes_two_slots(shape, small):
    placement = placed(offloading(65536), shape, small)
    layer_bytes = 65538 * 4096
    assert placement.memory.kv == pytest.approx((32 - placement.host.layers) * layer_bytes)
    assert placement.memory.buffers == pytest.approx(2 * layer_bytes)


def test_lower_codes_are_half_a_layer_and_its_drafts_lose_nothing(shape, small):
    """Of 264 bytes of a token and KV head the lower codes are 128."""
    kv = KVCache(KVFormat.HIERARCHICAL)
    plan = replace(offloading(131072), kv=kv, placement=Placement(True, part=HostPart.LOWER))
    placement, placed_plan = placed(plan, shape, small), placed(replace(plan, placement=Placement()), shape, small)
    lower = 131073 * 8 * 128
    assert placed_plan.memory.kv - placement.memory.kv == placement.host.layers * lower
    assert placement.memory.buffers - placed_plan.memory.buffers == 2 * lower
    assert placement.host.token_bytes == 8 * 128


def test_drafts_keep_the_upper_codes_of_their_budget(shape, small):
    """With drafts on upper codes, 2048 of 131073 tokens stay, in half of the bits."""
    plan = preset("quantspec-kv", Workload("m", "h200", 131072, new_tokens=1))
    plan = replace(plan, placement=Placement(True, 2048))
    placement, placed_plan = placed(plan, shape, small), placed(replace(plan, placement=Placement()), shape, small)
    freed = placed_plan.memory.kv / 32 * (1 - 2048 / 131073 / 2)
    assert placed_plan.memory.kv - placement.memory.kv == pytest.approx(placement.host.layers * freed)


def test_plans_that_keep_everything_on_the_device_offload_nothing_even_where_they_do_not_fit(shape, small):
    placement = placed(replace(offloading(65536), placement=Placement()), shape, small)
    assert placement.host.layers == 0
    assert placement.memory.peak > LIMIT


def test_no_more_layers_leave_than_there_are(shape, h200_profile):
    tiny = replace(h200_profile, hardware=replace(h200_profile.hardware, memory_bytes=10**9))
    assert placed(offloading(65536), shape, tiny).host.layers == 32


def test_a_token_of_a_layer_lies_on_the_host_in_its_stored_format(shape, small):
    placement = placed(offloading(65536), shape, small)
    codes = placed(replace(offloading(131072), kv=KVCache(KVFormat.INT8)), shape, small)
    assert placement.host.token_bytes == pytest.approx(4096, rel=1e-4)
    assert codes.host.token_bytes / placement.host.token_bytes == pytest.approx(1.03125 / 2, rel=1e-4)


def test_thresholds_agree_with_the_placement_at_every_length(shape, small):
    plan = preset("specontext", Workload("m", "h200", 4096, new_tokens=1))
    lengths = thresholds(plan, shape, small)
    assert list(lengths) == sorted(lengths)
    for cpu_layers in (0, 7, 20):
        for length, layers in ((lengths[cpu_layers] + 1, cpu_layers), (lengths[cpu_layers] + 3, cpu_layers + 1)):
            held = replace(plan, workload=replace(plan.workload, context=length - 1))
            assert placed(held, shape, small).host.layers == layers


def test_the_first_layer_that_is_streamed_takes_two_more_with_it(shape, small):
    """The slots for layers on their way take the memory of two, so that one or two alone would free nothing."""
    plan = offloading(1000)
    first, second, third, fourth, *_ = thresholds(plan, shape, small)
    assert first == second == third < fourth
    for length, layers in ((first + 1, 0), (first + 3, 3), (fourth + 1, 3), (fourth + 3, 4)):
        held = replace(plan, workload=replace(plan.workload, context=length - 1))
        assert placed(held, shape, small).host.layers == layers


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


def test_a_long_prompts_buffers_lie_in_the_draft_weights_memory(shape, machine):
    plain, drafted = (
        resident_memory(shape, machine, strategy(n, machine, shape)) for n in ("autoregressive", "quantspec")
    )
    assert plain.prefill_workspace - drafted.prefill_workspace == BUFFERS
    assert drafted.prefill_peak == drafted.resident + drafted.prefill_workspace
    # Were they allocated, it would be 25%: the 4-bit copy of the weights takes half of what the INT8 cache saves.
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
def test_nothing_is_swapped_without_draft_weights_a_long_prompt_and_a_gpu(name, context, changes, shape, machine):
    machine = replace(machine, **changes)
    assert swapped_bytes(shape, machine, strategy(name, machine, shape, context)) == 0


def test_draft_weights_are_restored_over_the_link_once_a_request(shape, machine):
    for batch in (1, 4):
        drafted, exact = (strategy(name, machine, shape, batch=batch) for name in ("quantspec", "quantspec-kv"))
        more_s = prefill_seconds(shape, machine, drafted) - prefill_seconds(shape, machine, exact)
        assert more_s == pytest.approx(BUFFERS / machine.host_link_bytes_per_s, rel=1e-6)


def test_thresholds_look_beyond_the_length_where_the_swap_begins(shape, machine):
    """Just before it a prompt takes 1.3 GB more, so a length may fit although a shorter one does not."""
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
        assert longest < MAX_TOKENS


def test_reserved_tokens_bring_every_threshold_forward(shape, small):
    machine = Machine.of(small)
    held = strategy_of(offloading(1000), shape, machine, 0.9)
    plain, reserved = offload_thresholds(shape, machine, held), offload_thresholds(shape, machine, held, 5)
    assert plain[0] > 10_000
    assert [early - late for early, late in zip(plain, reserved, strict=True)] == [5] * 33


def adaptive(context, new_tokens, batch=32, limit=72e9):
    plan = preset("specontext", Workload("m", "h200", context, new_tokens, batch))
    assert plan.placement.adaptive
    return replace(plan, placement=replace(plan.placement, memory_bytes=int(limit)))


def test_layers_that_leave_one_by_one_do_so_at_the_thresholds_of_algorithm_1(shape, machine):
    """S_i = (memory - i x slots) / (32 - i) in tokens of a layer (Eq 7), of which the last is the pass's own."""
    plan = adaptive(2048, 32768)
    layout = offload_layers(shape, machine, strategy_of(plan, shape, machine, 1.0))
    token_bytes, slots = 32 * 2 * 8 * 128 * 2, 2048 + 2 * 128 + 1
    memory, final = layout.departures.memory_bytes / token_bytes, int(layout.host.layers)
    thresholds = departure_lengths(plan, shape, machine)
    assert thresholds == tuple((memory - i * slots) // (32 - i) for i in range(final))
    for away, length in enumerate(thresholds):
        assert layout.host_at(length - 1).layers == away
        assert layout.host_at(length).layers == away + 1
    assert layout.host_at(2048).layers == 0
    assert layout.host_at(2048 + 32768).layers == final


def test_until_then_they_use_the_whole_limit(shape, machine):
    """But for less than one more slot of every row."""
    plan = adaptive(2048, 32768)
    static = replace(plan, placement=replace(plan.placement, adaptive=False))
    leaving, later = (offload_layers(shape, machine, strategy_of(one, shape, machine, 1.0)) for one in (plan, static))
    assert leaving.host == later.host
    assert leaving.spare_bytes == later.spare_bytes == 72e9 - later.memory.peak
    assert 0 <= 72e9 - leaving.memory.peak < 32 * 2 * 8 * 128 * 2


def test_a_generation_that_stays_below_the_first_threshold_costs_what_it_costs_without_a_limit(shape, h200_profile):
    plan = adaptive(2048, 8192, limit=72e9)
    free, limited = (predict(one, shape, h200_profile) for one in (replace(plan, placement=Placement()), plan))
    assert limited.offloaded_layers == 0
    assert limited.best.tpot_ms == pytest.approx(free.best.tpot_ms)


def test_the_time_of_a_generation_is_the_mean_over_its_lengths(shape, machine, h200_profile):
    """As a sum over every 64th length with the layers that are away then; and the layers' own moves."""
    plan = adaptive(2048, 32768)
    strategy, rates = strategy_of(plan, shape, machine, 1.0), rates_of(plan, shape, machine)
    layout, passes = offload_layers(shape, machine, strategy), round_rates(shape, machine, strategy, rates)
    lengths = range(2048 + 32, 2048 + 32768, 64)
    steps = [round_at(shape, machine, strategy, passes, at, layout.host_at(at)).total_s for at in lengths]
    moved_s = HostLink(shape, machine, strategy, layout.host).departure_seconds(layout.departures) / 32768
    estimate = evaluate(shape, machine, strategy, rates)
    assert estimate.tpot_s == pytest.approx(sum(steps) / len(steps) + moved_s, rel=0.01)
    static = strategy.with_terms(offload_adaptive=0)
    assert evaluate(shape, machine, static, rates).tpot_s > 1.3 * estimate.tpot_s
    none_away = prefill_seconds(shape, machine, strategy)
    assert estimate.ttft_s == none_away < evaluate(shape, machine, static, rates).ttft_s


def test_codes_leave_by_groups(shape, machine):
    """Rows of INT8 codes grow by groups of 128 tokens; one to two groups of recent ones are in a buffer."""
    plan = Plan(Workload("m", "h200", 2048, 65536, 16), kv=KVCache(KVFormat.INT8))
    plan = replace(plan, placement=Placement(True, 2048, memory_bytes=int(60e9), adaptive=True))
    departures = offload_layers(shape, machine, strategy_of(plan, shape, machine, 1.0)).departures
    group_bytes = 16 * 8 * (2 * 128 * 128 + 2 * 2 * 128 + 2 * 2 * 128)
    assert departures.unit_bytes == group_bytes
    for away, length in enumerate(departure_lengths(plan, shape, machine)):
        groups = departures.memory_bytes // ((32 - away) * group_bytes)
        assert length == (groups + 2) * 128 - 1
