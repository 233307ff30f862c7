"""From plans to terms: formats, budgets and kernel classes of known plans, written out."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ridgeplan.planner.lowering import kernel_class, rates_of, selection_classes, stack, strategy_of
from ridgeplan.roofline.catalog.model_shape import WeightBits
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.catalog.profile import shipped_profiles
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.latency import KERNEL_CLASSES, Device, Machine, RateTerms
from ridgeplan.roofline.passes import Op, decode_pass
from ridgeplan.roofline.plan.plan import KVCache, KVFormat, PlanError, Speculation, Workload
from ridgeplan.roofline.plan.policies.selections import RetrievalHead
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import draft_rates, target_rates, target_terms
from ridgeplan.roofline.strategy import UNLIMITED_TOKENS

LLAMA = load_shape("Llama-3.1-8B")
GPU = Device(memory_bytes=80e9, element_bytes=2, num_sms=132)
CPU = Device(memory_bytes=8e9, element_bytes=4, num_sms=2, asynchronous=0)
INT4 = 0.5 + 4 / 128  # a 4-bit weight, and a 128th of an fp16 scale and minimum


def plan_of(name, context=131072):
    return preset(name, Workload("m", "h200", context, 1000, 3))


def lowered(name, device=GPU, shape=LLAMA):
    return strategy_of(plan_of(name), shape, device, 0.9)


def test_lengths_and_speculation_are_the_plans():
    strategy = lowered("specattn")
    assert (strategy.batch, strategy.context, strategy.new_tokens, strategy.gamma) == (3, 131072, 1000, 7)
    assert (strategy.draft.ratio, strategy.acceptance, strategy.kv_group, strategy.queries) == (0.07, 0.9, 128, 8)


@pytest.mark.parametrize(
    "name, stores_full_kv, planes, target_bits, draft_bits",
    [
        ("autoregressive", 1, 0, 0, 0),
        ("int8", 0, 2, 8, 8),
        ("quantspec", 0, 2, 8, 4),
        ("quantspec-exact", 1, 1, 0, 4),  # the target reads full precision, drafts the shadow
        ("specattn", 1, 0, 0, 0),
    ],
)
def test_what_is_stored_and_read(name, stores_full_kv, planes, target_bits, draft_bits):
    strategy = lowered(name)
    assert (strategy.stores_full_kv, strategy.code_planes) == (stores_full_kv, planes)
    assert (strategy.target.bits, strategy.draft.bits) == (target_bits, draft_bits)


def test_drafts_without_upper_codes_read_what_the_target_reads():
    drafting = replace(plan_of("specattn"), kv=KVCache(KVFormat.INT8))
    assert strategy_of(drafting, LLAMA, GPU, 0.9).draft.bits == 8


@pytest.mark.parametrize(
    "name, target, draft, head, has_weights, dense",
    [
        ("autoregressive", 2, 2, 2, 0, (1, 1)),
        ("quantspec", 2, INT4, INT4, 1, (1, 0)),
        ("quantspec-kv", 2, 2, 2, 0, (1, 1)),
        ("int4-weights", INT4, INT4, 2, 0, (0, 0)),  # one 4-bit copy, the head in full precision
        ("int8-weights", 2 * INT4, 2 * INT4, 2 * INT4, 0, (0, 0)),  # two planes, also of the head
        ("quantspec-int8", 2 * INT4, INT4, INT4, 0, (0, 0)),  # drafts read the upper plane of the same copy
    ],
)
def test_bytes_per_parameter(name, target, draft, head, has_weights, dense):
    strategy = lowered(name)
    assert (strategy.target.weight_bytes, strategy.draft.weight_bytes, strategy.draft.head_bytes) == (
        target,
        draft,
        head,
    )
    assert (strategy.draft.has_weights, (strategy.target.dense, strategy.draft.dense)) == (has_weights, dense)


@pytest.mark.parametrize(
    "name, head, dense", [("quantspec", 2, 1), ("int4-weights", 2, 1), ("int8-weights", 2 * INT4, 0)]
)
def test_the_targets_head_has_8_bits_or_full_precision(name, head, dense):
    strategy = lowered(name)
    assert (strategy.target.head_bytes, strategy.target.head_dense) == (head, dense)


def test_full_precision_is_the_devices_or_what_the_checkpoint_holds():
    assert lowered("autoregressive", CPU).target.weight_bytes == 4
    assert lowered("autoregressive", GPU, load_shape("openai/gpt-oss-20b")).target.weight_bytes == 2  # its attention
    fp8, fp32 = load_shape("deepseek-ai/DeepSeek-V3"), replace(LLAMA, weight_bits=WeightBits(mlp=32, head=32))
    assert lowered("autoregressive", GPU, fp8).target.weight_bytes == 8.002 / 8
    assert lowered("autoregressive", GPU, fp8).draft.head_bytes == 2
    assert lowered("autoregressive", GPU, fp32).target.weight_bytes == 4
    assert lowered("autoregressive", GPU, fp32).draft.head_bytes == 4
    assert lowered("quantspec", GPU, replace(LLAMA, weight_bits=WeightBits(head=4))).draft.head_bytes == 0.5


def test_budgets_bind_only_where_there_are_any():
    plain, evicted, context = lowered("autoregressive"), lowered("dapq"), lowered("specontext")
    assert plain.eviction.budget == plain.offload.budget == plain.target.budget == UNLIMITED_TOKENS > 1e12
    assert evicted.eviction.budget == 1024
    assert (context.offload.active, context.offload.budget, context.target.budget) == (1, 2048, 2048)
    assert plain.offload.active == 0


@pytest.mark.parametrize(
    "name, target_keys, draft_keys, score_bytes",
    [
        ("autoregressive", 0, 0, 0),
        ("quest", 32 / 8, 0, 0),  # 2 keys of every 16 tokens, in 32 layers
        ("magicdec-quest", 0, 32 / 8, 0),
        ("specontext", 1, 0, 0),  # one head for all layers
        ("magicdec-snapkv", 0, 0, 0),  # chosen in prefill
        # fp32 scores of 8 KV heads are written, then read and added up; their sums are written and read six times
        ("specextend", 0, 0, 32 * 4 * (8 + 8 + 7)),
        ("specattn", 0, 0, 32 * 4 * (8 + 8 + 7)),
        ("progressive", 0, 0, 0),  # 2-bit keys are scanned by a cost of their own
    ],
)
def test_selections_are_priced_for_all_layers(name, target_keys, draft_keys, score_bytes):
    strategy = lowered(name)
    assert (strategy.target.scored_keys, strategy.draft.scored_keys) == (target_keys, draft_keys)
    assert strategy.draft.round_score_bytes == score_bytes
    # SpecExtend learns only from the result which query counts: each one leaves a score of every KV head.
    assert strategy.draft.query_score_bytes == (32 * 4 * 8 if name == "specextend" else 0)


def test_a_head_that_chooses_by_layer_scans_its_keys_once_and_ranks_the_scores_of_every_layer():
    """Of 32 layers and 8 KV heads, with 32 query heads where all layers share a choice; keys are 1/4 of the queries."""
    plan = plan_of("specontext")
    attention = [replace(plan.attention, selection=RetrievalHead(by_layer=each)) for each in (False, True)]
    shared, by_layer = (strategy_of(replace(plan, attention=selection), LLAMA, GPU, 0.9) for selection in attention)
    assert (by_layer.target.scored_keys, by_layer.held_keys, by_layer.target.top_k_launches) == (1, 1, 1)
    assert by_layer.target.score_bytes == 32 * shared.target.score_bytes == 32 * 8 * 4 * 7
    # Logits of 32 heads become probabilities of 8; those of a layer's own head rank as they are.
    assert (by_layer.target.logit_bytes, shared.target.logit_bytes) == (0, 32 * 4)
    assert (by_layer.held_score_bytes, shared.held_score_bytes) == (32 * 8 * 4, 8 * 4 + 32 * 4)
    assert (shared.target.projected_params, by_layer.target.projected_params) == (4096 * 5120, 4096 * 128 * (256 + 8))
    assert (
        shared.target.shared_across_layers,
        by_layer.target.shared_across_layers,
        by_layer.target.selected_before_pass,
    ) == (
        1,
        0,
        1,
    )
    assert by_layer.offload.slot_table_bytes == 32 * shared.offload.slot_table_bytes == 8 * 4
    with pytest.raises(PlanError, match="by_layer is true with level 'batch'; allowed: level 'head'"):
        RetrievalHead(level="batch", by_layer=True)


def test_scores_of_every_draft_query_are_priced_at_every_step():
    """8 KV heads' fp32 scores of every page of 16 in 32 layers, written once and read six times; others keep theirs."""
    strategies = {name: lowered(name) for name in ("progressive", "magicdec-quest", "specattn")}
    assert {name: strategy.draft.score_bytes for name, strategy in strategies.items()} == {
        "progressive": 0,
        "magicdec-quest": 32 * 8 * 4 * 7 / 16,
        "specattn": 0,
    }


def test_what_selections_keep_counts_as_memory():
    """Scores of 32 layers for SpecAttn, bounds for Quest; 2-bit keys and values by token where codes are gathered."""
    names = ("specattn", "specattn-int4", "magicdec-quest", "progressive", "quantspec")
    strategies = {name: lowered(name) for name in names}
    assert [strategies[name].held_score_bytes for name in names[:3]] == [32 * 8 * 4, 32 * 8 * 4, 8 * 4 / 16]
    assert [strategies[name].held_keys for name in names] == [0, 0, 32 * 2 / 16, 0, 0]
    assert [strategies[name].held_plane_bits for name in names] == [0, 32 * 6, 0, 32 * 6, 0]


@pytest.mark.parametrize(
    "name, part, kind, expected",
    [
        ("quantspec", "prefill", "linear", "prefill_linear"),
        ("quantspec", "prefill", "head", "head"),
        ("quantspec", "target", "linear", "linear"),
        ("quantspec", "target", "head", "head"),
        ("quantspec", "target", "attention", "attention_int8"),
        ("quantspec", "draft", "linear", "linear_int4"),
        ("quantspec", "draft", "head", "linear_int4"),
        ("quantspec", "draft", "attention", "attention_int4"),
        ("quantspec-kv", "draft", "head", "head"),
        ("quantspec-exact", "target", "attention", "attention"),
        ("int4-weights", "target", "linear", "linear_int4"),
        ("int4-weights", "draft", "head", "head"),
        ("quantspec-int8", "target", "linear", "linear_int8"),
        ("quantspec-int8", "target", "head", "linear_int8"),
        ("quantspec-int8", "draft", "head", "linear_int4"),
        ("quantspec", "draft", "rope", "rope"),
        ("specattn", "draft", "attention", "sparse_attention_full"),
        ("specattn-int4", "draft", "attention", "sparse_attention"),
        ("specattn", "target", "attention", "attention"),
        ("progressive", "draft", "attention", "progressive_attention"),
        ("progressive-target", "target", "attention", "sparse_attention_full"),
    ],
)
def test_kernel_classes_follow_the_formats(name, part, kind, expected):
    assert kernel_class(plan_of(name), LLAMA, part, kind) == expected
    if part != "prefill" and kind != "rope":
        rates = {kernel_class: RateTerms(index, 1.0, 0.0) for index, kernel_class in enumerate(KERNEL_CLASSES, start=1)}
        machine = Machine(**{**vars(GPU), **dict.fromkeys(MACHINE_FIELDS, 1.0), "rates": rates})
        assert getattr(getattr(rates_of(plan_of(name), LLAMA, machine), part), kind) == rates[expected]


MACHINE_FIELDS = set(Machine.__dataclass_fields__) - set(Device.__dataclass_fields__)


def test_what_a_target_chooses_by_is_held_and_chosen_as_often_as_it_says():
    """Quest: two bounds of 16 keys in each of 32 layers. The head: keys of one layer, and one choice for all."""
    strategies = {
        name: lowered(name) for name in ("quest", "specontext-resident", "progressive-target", "autoregressive")
    }
    assert [strategy.target.selects for strategy in strategies.values()] == [1, 1, 1, 0]
    assert [strategy.held_keys for strategy in strategies.values()] == [4, 1, 0, 0]
    assert [strategy.target.top_k_launches for strategy in strategies.values()] == [32, 1, 32, 32]
    assert [strategy.held_plane_bits for strategy in strategies.values()] == [0, 0, 32 * 6, 0]
    moved = [strategy.target.score_bytes for strategy in strategies.values()]
    assert moved == [32 * 7 * 4 * 8 / 16, 7 * 4 * 8, 0, 0]  # written once and read by six passes of top-k


def test_each_query_of_a_target_that_selects_reads_a_selection_of_its_own():
    """Three drafts and a bonus token: 4 times 2048 tokens for a selection, and the whole cache once without one."""
    machine = Machine(**{**vars(GPU), **dict.fromkeys(MACHINE_FIELDS, 1.0)})

    def kv_bytes(name, gamma):
        drafting = replace(plan_of(name), speculation=Speculation(gamma))
        terms = target_terms(LLAMA, machine, strategy_of(drafting, LLAMA, GPU, 0.9), 131072)
        (read,) = (op.total.read_bytes for op in decode_pass(LLAMA, terms) if op.name == "attention")
        return read

    assert kv_bytes("quest", 0) == pytest.approx(32 * 3 * 2 * 8 * 128 * 2049 * 2, rel=0.2)
    assert kv_bytes("quest", 3) / kv_bytes("quest", 0) == pytest.approx(4, rel=0.01)
    assert kv_bytes("autoregressive", 3) / kv_bytes("autoregressive", 0) == pytest.approx(1, rel=0.01)


def test_attention_to_chosen_tokens_has_its_own_rates():
    rates = {kind: RateTerms(0.5, 0.5, number * 1e-6) for number, kind in enumerate(KERNEL_CLASSES)}
    machine = Machine(**{**vars(GPU), **dict.fromkeys(MACHINE_FIELDS, 1.0), "rates": rates})
    assert rates_of(plan_of("quest"), LLAMA, machine).target.attention == rates["sparse_attention_full"]
    assert rates_of(plan_of("progressive-target-int8"), LLAMA, machine).target.attention == rates["sparse_attention"]
    assert rates_of(plan_of("specattn"), LLAMA, machine).draft.attention == rates["sparse_attention_full"]
    assert rates_of(plan_of("specattn-int4"), LLAMA, machine).draft.attention == rates["sparse_attention"]
    assert rates_of(plan_of("progressive"), LLAMA, machine).draft.attention == rates["progressive_attention"]
    assert rates_of(plan_of("magicdec-quest"), LLAMA, machine).target.attention == rates["attention"]


@pytest.mark.parametrize(
    ("rows", "inputs", "group", "integer"),
    [(1, 4096, 128, True), (1, 18944, 128, False), (3, 14336, 128, False), (1, 1728, 128, False), (1, 4096, 64, False)],
)
def test_products_of_4_bits_are_priced_by_the_kernel_that_multiplies_them(rows, inputs, group, integer):
    """That of integers where the kernels' schedules choose it, in linear layers as in the head."""
    (profile,) = shipped_profiles()
    machine, plan = Machine.of(profile), plan_of("quantspec")
    plan = replace(plan, weights=replace(plan.weights, group=group), workload=replace(plan.workload, batch=rows))
    strategy = strategy_of(plan, LLAMA, machine, 0.9)
    rates = draft_rates(LLAMA, machine, strategy, rates_of(plan, LLAMA, machine))
    expected = machine.rates["linear_int4_integer" if integer else "linear_int4"].at_rows(rows)
    for kind in ("linear", "head"):
        priced = machine.rates_for(Op("x", kind, Cost(), 1, 3584, inputs), rates)
        assert replace(priced, integer_inputs=0.0) == replace(expected, integer_inputs=0.0)


def test_several_plans_are_priced_by_their_own_kernels():
    """Stacked: 4-bit, 8-bit and dense weights, of which 4 bits take no integers for 4 rows of 14336 inputs."""
    (profile,) = shipped_profiles()
    machine = Machine.of(profile)
    plans = [
        replace(plan_of(name), workload=Workload("m", "h200", 4096, 100, 4))
        for name in ("int4-weights", "int8-weights", "autoregressive")
    ]
    strategies = stack([strategy_of(plan, LLAMA, machine, 0.9) for plan in plans], [1, 1, 1])
    rates = target_rates(
        LLAMA, machine, strategies, stack([rates_of(plan, LLAMA, machine) for plan in plans], [1, 1, 1])
    )
    priced = machine.rates_for(Op("x", "linear", Cost(), 1, 4096, 14336), rates)
    kinds = ("linear_int4", "linear_int8_integer", "linear")
    assert priced.launch_s.tolist() == [machine.rates[kind].at_rows(4).launch_s for kind in kinds]


def test_narrow_heads_have_their_own_class():
    narrow = replace(LLAMA, head_dim=64)
    assert kernel_class(plan_of("quantspec"), narrow, "draft", "attention") == "attention_int4_d64"


def test_scans_for_many_query_heads_of_a_kv_head_have_their_own_classes():
    """CUDA C++ kernels scan for up to 8 of them, Triton's for more."""
    few, many = (replace(LLAMA, q_heads=heads * LLAMA.kv_heads) for heads in (8, 9))
    kinds = [kernel_class(plan_of("progressive"), shape, "draft", "attention") for shape in (few, many)]
    assert kinds == ["progressive_attention", "progressive_attention_wide"]
    plan = plan_of("progressive-target")
    scans = [name for shape in (few, many) for name in selection_classes(plan, shape, "target")]
    assert scans == ["two_bit_scan", "two_bit_scan_wide"]


def test_a_plan_and_a_shape_of_other_degrees_are_refused():
    plan = plan_of("quantspec")
    divided = replace(plan, workload=replace(plan.workload, parallel=Parallel(2)))
    with pytest.raises(PlanError, match="the plan is for tp 2; allowed: one GPU"):
        strategy_of(divided, LLAMA, GPU, 0.9)


@dataclass(frozen=True)
class Inner:
    rate: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    same: int
    own: int


def test_plans_are_stacked_field_by_field_each_as_often_as_its_grid_is_large():
    stacked = stack([Outer(Inner(0.5), 7, 1), Outer(Inner(0.25), 7, 2)], [2, 3])
    np.testing.assert_array_equal(stacked.own, [1, 1, 2, 2, 2])
    np.testing.assert_array_equal(stacked.inner.rate, [0.5, 0.5, 0.25, 0.25, 0.25])
    assert stacked.same == 7  # what all plans share stays a number
