"""A round's parts, worked out by hand: what its passes read, at which rates, and what surrounds them."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.kernels.linear import schedule as dense_schedule
from ridgeplan.kernels.linear import schedule as int4_schedule
from ridgeplan.kernels.linear.schedule import DeviceLimits
from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import Rates, RowStep
from ridgeplan.roofline.cost import Cost
from ridgeplan.roofline.execution import (
    CUDA_FUSED_SWIGLU_ROWS,
    GROUPED_EXTRA_ROWS,
    GROUPED_MXFP4_EXTRA_ROWS,
    PROMPT_EXPERTS_SHARE,
    PROMPT_EXPERTS_SPREAD,
    PROMPT_MXFP4_SHARE,
)
from ridgeplan.roofline.latency import Machine, RateTerms
from ridgeplan.roofline.memory import resident_memory
from ridgeplan.roofline.passes import Op, decode_pass
from ridgeplan.roofline.plan.plan import Plan, Speculation, Workload
from ridgeplan.roofline.plan.policies.selections import Quest, ShadowKV
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import (
    PAGE_GAIN,
    Round,
    cached_tokens,
    draft_rates,
    draft_terms,
    flush_seconds,
    prefill_rates,
    round_at,
    round_rates,
    round_tokens,
    saved_by_size,
    target_choice_seconds,
    target_rates,
    target_terms,
)

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))


@pytest.fixture(scope="module")
def machine(h200_profile):
    steps = (RowStep(16, launch_s=1e-6),)
    classes = {
        **{kind: replace(rates, steps=()) for kind, rates in h200_profile.classes.items()},
        "prefill_linear": Rates(0.5, 0.001, 9e-6, 0.05),  # slower than any other class
        "linear_int4": Rates(0.5, 0.5, 3e-6, 0.1, steps=steps),
    }
    return Machine.of(replace(h200_profile, classes=classes))


SHAPE = load_shape("Llama-3.1-8B")


def lowered(name, machine, batch=1, context=4096):
    """Strategy and rates of a preset."""
    plan = preset(name, Workload("Llama-3.1-8B", "h200", context, batch=batch))
    return strategy_of(plan, SHAPE, machine, 0.9), rates_of(plan, SHAPE, machine)


def round_of(name, machine, batch=1, context=4096, **changes):
    """A round at the end of the prompt."""
    strategy, rates = lowered(name, machine, batch, context)
    changed = strategy.with_terms(**changes)
    return round_at(SHAPE, machine, changed, round_rates(SHAPE, machine, changed, rates), context)


def test_products_of_gate_and_up_fit_the_kernels_up_to_the_priced_rows():
    shape = load_shape("Llama-3.1-8B")
    outputs, inputs = 2 * shape.intermediate, shape.hidden
    for rows in range(1, CUDA_FUSED_SWIGLU_ROWS + 1):
        assert dense_schedule.make_dense_schedule(rows, outputs, inputs, True, True, H200)
        assert int4_schedule.make_quantized_schedule(rows, outputs, inputs, 128, True, True, H200)
    assert dense_schedule.make_dense_schedule(CUDA_FUSED_SWIGLU_ROWS + 1, outputs, inputs, True, True, H200) is None
    assert (
        int4_schedule.make_quantized_schedule(CUDA_FUSED_SWIGLU_ROWS + 1, outputs, inputs, 128, True, True, H200)
        is None
    )


@pytest.mark.parametrize("batch, fused", [(8, 1), (9, 0)])
def test_products_of_few_rows_on_a_device_activate_what_they_write(machine, batch, fused):
    shape = load_shape("Llama-3.1-8B")
    terms = target_terms(shape, machine, lowered("autoregressive", machine, batch)[0], 4096)
    ops_by_name = {op.name: op for op in decode_pass(shape, terms)}
    assert ops_by_name["mlp swiglu"].launches == (1 - fused) * shape.layers
    assert ops_by_name["mlp gate + up"].cost.write_bytes == batch * (2 - fused) * shape.intermediate * 2
    host = replace(machine, fused_swiglu_rows=0)
    assert target_terms(shape, host, lowered("autoregressive", host, 1)[0], 4096).fused_swiglu == 0


def test_rows_of_a_verification_are_queries_of_all_sequences(machine):
    """5 queries of 2 sequences are more than the 8 rows that kernels activate, one of each is not."""
    strategy, _ = lowered("quantspec", machine, batch=2)
    assert target_terms(SHAPE, machine, strategy, 4096).fused_swiglu == 0
    assert draft_terms(SHAPE, machine, strategy, 4096).fused_swiglu == 1


# Of 4096 tokens in groups of 128, a group and a half are in the buffer on average.
@pytest.mark.parametrize(
    "name, target, draft",
    [
        ("autoregressive", (0, 0, 4096 + 1), (0, 0, 4096 + 1)),
        ("int8", (8, 3904, 192 + 1), (8, 3904, 192 + 1)),
        ("quantspec", (8, 3904, 192 + 5), (4, 3904, 192 + 1)),
        ("quantspec-exact", (0, 0, 4096 + 5), (4, 3904, 192 + 1)),
        ("magicdec-streaming", (0, 0, 4096 + 3), (0, 0, 1024 + 1)),  # a quarter of the tokens
        ("quest", (0, 0, 2048 + 1), (0, 0, 4096 + 1)),  # a budget of 2048
    ],
)
def test_bits_codes_and_full_tokens_that_a_pass_reads(ideal, name, target, draft):
    strategy, _ = lowered(name, ideal)
    for terms, expected in ((target_terms, target), (draft_terms, draft)):
        pass_terms = terms(SHAPE, ideal, strategy, 4096)
        assert (pass_terms.bits, pass_terms.quantized_tokens, pass_terms.full_tokens) == expected


@pytest.mark.parametrize(
    "name, prompt, generated, read, scored",
    [
        ("quest", 4096, 0, 2048, 4096),
        ("quest", 4096, 1000, 2048 + 1000, 4096),  # the prompt's pages are scored, and what is generated is read whole
        (
            "clusterkv",
            2048,
            32768,
            2048 + 32768,
            2048,
        ),  # a prompt within the budget: full attention
        ("shadowkv", 4096, 1000, 2048 + 48 * 8 + 1000, 4096),  # outliers beside the budget
        ("oracle-target", 4096, 1000, 2048, 5096),
    ],
)
def test_generated_tokens_are_read_beside_the_budget(ideal, name, prompt, generated, read, scored):
    strategy, _ = lowered(name, ideal, context=prompt)
    assert target_terms(SHAPE, ideal, strategy, prompt + generated).full_tokens == read + 1
    assert strategy.target_candidates(prompt + generated) == scored


def test_generated_tokens_that_compete_for_the_budget_are_scored_in_turn(ideal):
    plan = preset("quest", Workload("Llama-3.1-8B", "h200", 4096))
    plan = replace(plan, attention=replace(plan.attention, selection=Quest(keep_generated=False)))
    strategy = strategy_of(plan, SHAPE, ideal, 0.9)
    assert target_terms(SHAPE, ideal, strategy, 5096).full_tokens == 2048 + 1
    kept, _ = lowered("quest", ideal)
    seconds = [target_choice_seconds(SHAPE, ideal, each, 5096) for each in (strategy, kept)]
    assert seconds[0] > seconds[1] == target_choice_seconds(SHAPE, ideal, kept, 4096)


def test_generated_tokens_that_are_kept_are_read_as_a_run(ideal):
    """In full precision on the device; where they are codes they are listed one by one."""
    strategy, _ = lowered("clusterkv", ideal)
    assert strategy.streamed_share(4096) == 0
    assert strategy.streamed_share(4096 + 6144) == 6144 / (2048 + 6144)
    assert strategy.with_terms(stores_full_kv=0).streamed_share(4096 + 6144) == 0
    assert strategy.with_terms(offload_active=1).streamed_share(4096 + 6144) == 0
    assert lowered("oracle-target", ideal)[0].streamed_share(4096 + 6144) == 0
    # They lose a quarter of 32 us a launch, less than MAX_GATHER_LOSS_S.
    slow = replace(ideal, rates={**ideal.rates, "sparse_attention_full": RateTerms(0.8, 1.0, 0.0)})
    rates = rates_of(preset("clusterkv", Workload("Llama-3.1-8B", "h200", 4096)), SHAPE, slow)
    strategy = strategy.with_terms(target_budget=256)
    listed = strategy.with_terms(offload_active=1)
    seconds = [
        round_at(SHAPE, slow, each, round_rates(SHAPE, slow, each, rates), 4096 + 6144).verify_s
        for each in (strategy, listed)
    ]
    listed_bytes = 4 * SHAPE.kv_heads * SHAPE.layers  # of a token's number, for each KV head
    token_bytes = 2 * SHAPE.layers * SHAPE.kv_elements_per_token_per_layer + listed_bytes
    lost_s = (256 + 6144 + 1) * token_bytes / slow.bandwidth_bytes_per_s / 4
    assert seconds[1] - seconds[0] == pytest.approx(PAGE_GAIN * 6144 / (256 + 6144) * lost_s, rel=0.01)


def test_drafts_read_outliers_beside_their_ratio(ideal):
    drafts = Speculation(3, selection=ShadowKV(ratio=0.25, outliers=10))
    plan = Plan(Workload("Llama-3.1-8B", "h200", 4096), speculation=drafts)
    assert draft_terms(SHAPE, ideal, strategy_of(plan, SHAPE, ideal, 0.9), 4096).full_tokens == 1024 + 80 + 1
    assert drafts.selection.share_of(4096, 0.25) == pytest.approx((1024 + 80) / 4096)
    assert drafts.selection.among_all == ShadowKV(ratio=0.25, outliers=10, keep_generated=False)


def test_after_an_eviction_the_cache_grows_from_what_it_left(ideal):
    strategy, _ = lowered("snapkv", ideal, context=131072)
    assert cached_tokens(strategy, 131072) == 1024
    assert cached_tokens(strategy, 131072 + 500) == 1524
    assert cached_tokens(lowered("autoregressive", ideal)[0], 5000) == 5000


def test_attention_is_cut_into_the_splits_of_the_prompt(ideal):
    strategy, _ = lowered("quantspec", ideal, context=131072)
    for terms in (target_terms, draft_terms):
        assert terms(SHAPE, ideal, strategy, 131072).splits == 33  # 2 x 132 programs over 8 KV heads


def test_rounds_end_at_flush_boundaries_where_the_target_reads_codes(ideal):
    tokens = 1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4
    assert round_tokens(lowered("quantspec-exact", ideal)[0]) == pytest.approx(tokens)
    assert round_tokens(lowered("quantspec", ideal)[0]) == pytest.approx(tokens / (1 + (tokens - 1) / 2 / 128))
    assert round_tokens(lowered("int8", ideal)[0]) == 1


TOKEN = 131_072  # bytes: keys and values of 8 heads x 128 in 32 layers, bf16
UPPER, BOTH = 32 * 8 * (2 * 64 + 8), 32 * 8 * (2 * 128 + 8)  # codes of a token with scales and minima


@pytest.mark.parametrize("batch", [1, 3])
def test_a_flush_quantizes_a_group_and_moves_the_buffer(ideal, batch):
    """128 tokens are read in bf16 and written as codes; 128 more and the round's 5 move to the buffer's front."""
    moved_bytes = batch * (128 * (TOKEN + BOTH) + 2 * (128 + 5) * TOKEN)
    strategy, _ = lowered("quantspec", ideal, batch)
    assert flush_seconds(SHAPE, ideal, strategy) == pytest.approx(moved_bytes / 1e12)
    shadow, _ = lowered("quantspec-exact", ideal, batch)  # whose full-precision cache stays where it is
    assert flush_seconds(SHAPE, ideal, shadow) == pytest.approx(batch * 128 * (TOKEN + UPPER) / 1e12)
    assert flush_seconds(SHAPE, ideal, lowered("autoregressive", ideal, batch)[0]) == 0
    # One flush comes every 128 tokens.
    share = round_tokens(strategy) / 128
    assert round_of("quantspec", ideal, batch).flush_s == pytest.approx(share * moved_bytes / 1e12)


@pytest.mark.parametrize("name, logits", [("autoregressive", 1 + 1), ("quantspec", 5 + 2)])
def test_acceptance_reads_all_queries_logits_and_both_distributions_of_one(ideal, name, logits):
    """Rejection sampling draws one token a sequence from what the target's distribution exceeds the draft's by."""
    accept_s = round_of(name, ideal, batch=3).accept_s
    assert accept_s == pytest.approx(3 * logits * 128_256 * 2 / 1e12)


def test_verification_of_drafts_launches_more_than_a_draw(ideal):
    """5 us above one query, and 1 us for each query whose draft is looked at in turn; a draw has one query."""
    sampling = RateTerms.of(Rates(1.0, 1.0, 0.0, 0.0, depth_s=1e-6, steps=(RowStep(1, launch_s=5e-6),)))
    machine = replace(ideal, rates={**ideal.rates, "sampling": sampling})
    others = {name: round_of(name, ideal) for name in ("autoregressive", "quantspec")}
    plain, drafting = (round_of(name, machine).accept_s - others[name].accept_s for name in others)
    gamma = others["quantspec"].passes
    assert (plain, drafting) == pytest.approx((1e-6, 5e-6 + 1e-6 * (gamma + 1)))
    assert round_of("quantspec", machine).draft_s - others["quantspec"].draft_s == pytest.approx(1e-6)


def test_quest_reads_4_layers_of_keys_at_every_draft_step(ideal):
    """2 of 16 keys in 32 layers; keys of a layer are 8 heads of 128 elements a token."""
    scored, free = (round_of("magicdec-quest", ideal, 3, **changes) for changes in ({}, {"draft_scored_keys": 0}))
    assert scored.draft_s - free.draft_s == pytest.approx(3 * 4096 * 4 * 8 * 128 * 2 / 1e12)
    scored, free = (round_of("quest", ideal, 3, **changes) for changes in ({}, {"target_scored_keys": 0}))
    assert scored.verify_s - free.verify_s == pytest.approx(3 * 4096 * 4 * 8 * 128 * 2 / 1e12)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_progressive_drafts_scan_2_bits_of_a_key_and_the_scales_of_its_group(ideal, group, element_bytes):
    """In 32 layers of 8 heads of 128 channels, whatever bits the keys themselves have."""
    plan = preset("progressive", Workload("Llama-3.1-8B", "h200", 4096, 1, 3))
    plan = replace(plan, kv=replace(plan.kv, group=group))
    machine = replace(ideal, element_bytes=element_bytes)
    shape = load_shape("Llama-3.1-8B")
    strategy = strategy_of(plan, shape, machine, 0.9)
    rates = round_rates(shape, machine, strategy, rates_of(plan, shape, machine))
    scanned, free = (
        round_at(shape, machine, strategy.with_terms(draft_scans_two_bit=scans), rates, 4096).draft_s
        for scans in (1, 0)
    )
    assert strategy.draft.scans_two_bit == 1
    assert scanned - free == pytest.approx(3 * 4096 * 32 * 8 * 128 * (2 + 32 / group) / 8 / 1e12)


def test_specattn_adds_up_the_scores_of_8_heads_and_ranks_their_sums(ideal):
    """Verification writes scores as it reads the keys. They are read, and their sums written once and read 6 times by
    top-k; of all 32 layers in one launch."""
    scores = (2 * 8 + 1 + 6) * 4
    assert round_of("specattn", ideal, 3).select_s == pytest.approx(3 * 4096 * 32 * scores / 1e12)
    launched = replace(ideal, rates={**ideal.rates, "top_k": RateTerms(1.0, 1.0, 5e-6)})
    assert round_of("specattn", launched, 3).select_s - round_of("specattn", ideal, 3).select_s == pytest.approx(5e-6)
    assert round_of("specattn", launched, 3, gamma=0).select_s == 0  # nothing is chosen for no drafts
    # Counting in tiles of shared memory is slower than reading: 6 passes over a sum of each token in each layer.
    counted = replace(ideal, rates={**ideal.rates, "top_k": RateTerms(1.0, 1e-6, 0.0)})
    assert round_of("specattn", counted, 3).select_s == pytest.approx(6 * 3 * 4096 * 32 / (1e-6 * ideal.compute_flops))


def test_a_round_is_gamma_drafts_and_everything_else_once():
    parts = Round(passes=4, draft_s=1.0, verify_s=20.0, accept_s=300.0, select_s=4000.0, flush_s=50_000.0)
    assert parts.total_s == 54_324


@pytest.mark.parametrize("batch, many", [(25, False), (26, True)])
def test_a_verification_of_many_rows_runs_the_librarys_products(machine, batch, many):
    strategy, rates = lowered("quantspec", machine, batch)
    rates = target_rates(SHAPE, machine, replace(strategy, gamma=4), rates)  # 125 or 130 rows
    for kind in ("linear", "head"):
        assert rates[kind].launch_s == machine.rates["prefill_linear" if many else kind].launch_s


@pytest.mark.parametrize("bits, gate, output", [(16, 5e-6, 3e-6), (4, 3e-6, 3e-6)])
def test_products_of_many_channels_are_the_librarys_from_nine_rows_on(machine, bits, gate, output):
    """5 queries of 2 sequences are 10 rows; a step above 16 adds 2 us, which 28672 outputs in 16 bits reach."""
    stepped = RateTerms.of(Rates(0.5, 0.5, 3e-6, 0.1, steps=(RowStep(16, launch_s=2e-6),)))
    strategy, rates = lowered("quantspec" if bits == 16 else "int4-weights", machine, 2)
    rates = replace(rates, target=replace(rates.target, linear=stepped))
    rates_of_runtime = target_rates(SHAPE, machine, replace(strategy, gamma=4), rates)
    wide, narrow = (Op("x", "linear", Cost(), 1, width, 4096) for width in (28672, 6144))
    assert machine.rates_for(wide, rates_of_runtime).launch_s == pytest.approx(gate)
    assert machine.rates_for(narrow, rates_of_runtime).launch_s == pytest.approx(output)
    assert machine.rates_for(wide, {"linear": stepped}) == stepped


def test_drafts_have_a_row_a_sequence_and_4_bit_products_no_other_kernel(machine):
    names = ("quantspec-kv", "quantspec")
    dense, narrow = (draft_rates(SHAPE, machine, *lowered(name, machine, 129)) for name in names)
    assert dense["linear"].launch_s == dense["head"].launch_s == 9e-6
    assert narrow["linear"] == narrow["head"] == machine.rates["linear_int4"].at_rows(129)
    assert narrow["linear"].launch_s == pytest.approx(4e-6)


def test_the_head_is_dense_also_where_the_targets_weights_are_not(machine):
    few, many = (target_rates(SHAPE, machine, *lowered("int4-weights", machine, batch)) for batch in (1, 129))
    assert (few["linear"].launch_s, many["linear"].launch_s) == pytest.approx((3e-6, 4e-6))
    assert (few["head"].launch_s, many["head"].launch_s) == (machine.rates["head"].launch_s, 9e-6)


def test_attentions_rows_are_queries_times_query_heads_of_a_group(machine):
    """Llama-3.1-8B has 4 query heads per KV head: 5 queries are 20 rows, above the step at 16."""
    stepped = RateTerms.of(Rates(0.5, 0.5, 3e-6, 0.1, steps=(RowStep(16, launch_s=1e-6),)))
    strategy, rates = lowered("quantspec", machine, 1)
    rates = replace(rates, target=replace(rates.target, attention=stepped))
    launches = [
        target_rates(SHAPE, machine, replace(strategy, gamma=gamma), rates)["attention"].launch_s for gamma in (3, 4)
    ]
    assert launches == pytest.approx([3e-6, 4e-6])


def test_a_batch_of_plans_at_once(machine):
    gammas = np.array([1.0, 127.0, 128.0])
    strategy, rates = lowered("quantspec", machine, 1)
    linear = target_rates(SHAPE, machine, replace(strategy, gamma=gammas), rates)["linear"]
    np.testing.assert_allclose(linear.launch_s, [machine.rates["linear"].launch_s] * 2 + [9e-6])


# Selected tokens that lie apart cost more to read than pages of them.

GATHER_SHAPE = load_shape("Llama-3.1-8B")  # 128 channels: 256 bytes a key


@pytest.fixture
def gather_machine(ideal: Machine) -> Machine:
    """1 TB/s, a fifth of it where attention reads chosen tokens."""
    return replace(ideal, rates={**ideal.rates, "sparse_attention_full": RateTerms(0.2, 1.0, 0.0)})


def draft_s(gather_machine: Machine, page_tokens: float) -> float:
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, GATHER_SHAPE, gather_machine, 0.9).with_terms(
        draft_page_tokens=page_tokens, draft_round_score_bytes=0
    )
    rates = round_rates(GATHER_SHAPE, gather_machine, strategy, rates_of(plan, GATHER_SHAPE, gather_machine))
    return float(round_at(GATHER_SHAPE, gather_machine, strategy, rates, 32768).draft_s)


def read_s(gather_machine: Machine) -> float:
    """Seconds to stream the drafts' KV."""
    plan = preset("specattn", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, GATHER_SHAPE, gather_machine, 0.9)
    ops = decode_pass(GATHER_SHAPE, draft_terms(GATHER_SHAPE, gather_machine, strategy, 32768))
    return float(sum(op.total.read_bytes for op in ops if op.name == "attention")) / 1e12


def test_of_a_page_all_but_the_first_token_come_closer_to_streams(gather_machine: Machine) -> None:
    """Single tokens take 5 times as long as a stream: pages save PAGE_GAIN of the 4 on top, but for the first token."""
    saved = draft_s(gather_machine, 1) - draft_s(gather_machine, 16)
    assert saved == pytest.approx(4 * PAGE_GAIN * (1 - 1 / 16) * read_s(gather_machine), rel=1e-6)


def test_pages_and_runs_save_nothing_on_a_cpu(gather_machine: Machine) -> None:
    """What attention to chosen tokens loses there are small operations, which a run of tokens needs as well."""
    cpu = replace(gather_machine, asynchronous=0)
    assert draft_s(cpu, 1) == draft_s(cpu, 16) == draft_s(cpu, 2**40)


def test_what_a_scan_chose_is_gathered(ideal: Machine) -> None:
    """A progressive draft reads its chosen codes at a quarter of the bandwidth, not at its class's half of it."""
    plan = preset("progressive", Workload("Llama-3.1-8B", "h200", 32768))
    taken_s = []
    for gather in (1.0, 0.25):
        both = {"gather": RateTerms(gather, 1.0, 0.0), "progressive_attention": RateTerms(0.5, 1.0, 0.0)}
        slower = replace(ideal, rates={**ideal.rates, **both})
        strategy = strategy_of(plan, GATHER_SHAPE, slower, 0.9)
        rates = round_rates(GATHER_SHAPE, slower, strategy, rates_of(plan, GATHER_SHAPE, slower))
        taken_s.append(float(round_at(GATHER_SHAPE, slower, strategy, rates, 32768).draft_s))
    ops = decode_pass(GATHER_SHAPE, draft_terms(GATHER_SHAPE, ideal, strategy, 32768))
    read_bytes = sum(float(op.total.read_bytes) for op in ops if op.category == "attention")
    assert taken_s[1] - taken_s[0] == pytest.approx((4 - 2) * read_bytes / ideal.bandwidth_bytes_per_s, rel=1e-6)


def test_attention_to_all_tokens_has_no_pages(gather_machine: Machine) -> None:
    plan = preset("quantspec-kv", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, GATHER_SHAPE, gather_machine, 0.9)
    assert (strategy.draft.page_tokens, strategy.target.page_tokens) == (1, 1)


def test_scores_are_scanned_as_attention_streams(gather_machine: Machine) -> None:
    """An eighth of 32 layers' keys of 32768 tokens, 8 heads of 128 channels: 268 MB at half of 1 TB/s."""
    slow = replace(gather_machine, rates={**gather_machine.rates, "attention": RateTerms(0.5, 1.0, 0.0)})
    plan = preset("magicdec-quest", Workload("Llama-3.1-8B", "h200", 32768))
    strategy = strategy_of(plan, GATHER_SHAPE, slow, 0.9)
    rates = round_rates(GATHER_SHAPE, slow, strategy, rates_of(plan, GATHER_SHAPE, slow))
    scored, free = (
        round_at(GATHER_SHAPE, slow, strategy.with_terms(draft_scored_keys=keys), rates, 32768)
        for keys in (strategy.draft.scored_keys, 0)
    )
    keys_bytes = 32 * 32768 * 8 * 128 * 2 / 8
    assert scored.draft_s - free.draft_s == pytest.approx(keys_bytes / 0.5e12, rel=1e-6)


def test_every_query_of_the_target_scores_and_ranks_for_itself(ideal):
    """Verification of 4 queries takes 4 times a step's choices: scanning bounds of pages, and ranking them."""
    plan = preset("specontext", Workload("Llama-3.1-8B", "h200", 65536))
    plan = replace(plan, attention=replace(plan.attention, selection=Quest()))
    shape = load_shape("Llama-3.1-8B")
    plain = strategy_of(plan, shape, ideal, 0.9).with_terms(gamma=0)
    step_s, verify_s = (target_choice_seconds(shape, ideal, held, 65536) for held in (plain, plain.with_terms(gamma=3)))
    assert step_s > 0
    assert verify_s == pytest.approx(4 * step_s)


@pytest.mark.parametrize("batch, lost_us", [(1, 8.9), (4, 10.0), (64, 10.0)])
def test_attention_to_tokens_in_full_precision_loses_so_much_a_launch_at_most(batch, lost_us, ideal):
    """8.9 MB a layer, of 2048 tokens and partial results, lose 8.9 us at half of 1 TB/s; 4 sequences would lose 36."""
    sparse = RateTerms(0.5, 1.0, 0.0)
    slow = replace(ideal, rates={**ideal.rates, "sparse_attention_full": sparse})
    held, rates = lowered("specontext", slow, batch=batch, context=65536)
    passes = target_rates(SHAPE, slow, held, rates)
    target = decode_pass(SHAPE, target_terms(SHAPE, slow, held, 65536))
    (read_bytes,) = (op.total.read_bytes for op in target if op.category == "attention")
    saved_s = saved_by_size(slow, held, target, passes)
    assert 1e6 * (read_bytes / 1e12 - saved_s) / 32 == pytest.approx(lost_us, rel=0.01)
    assert saved_by_size(slow, held.with_terms(target_bits=8), target, passes) == 0
    assert saved_by_size(replace(slow, asynchronous=0), held, target, passes) == 0


def test_small_kernels_of_a_choice_take_a_gather_s_launch_each(ideal):
    """70 of a retrieval head a query, and one a layer that joins queries; Quest's were not counted."""
    slow = replace(ideal, rates={**ideal.rates, "gather": RateTerms(1.0, 1.0, 2e-6)})
    for name, kernels in (("specontext-resident", 70), ("quest", 0), ("autoregressive", 0)):
        held, rates = lowered(name, slow, context=65536)
        near, far = (
            round_at(SHAPE, each, held, round_rates(SHAPE, each, held, rates), 65536).verify_s for each in (ideal, slow)
        )
        joined = 32 if name != "autoregressive" else 0
        assert far - near == pytest.approx((kernels + joined) * 2e-6)


def test_a_retrieval_head_projects_once_for_all_queries_of_a_verification(ideal):
    """Its weights are read once at 1 TB/s, however many queries follow; only scores and ranks are each query's own."""
    held = lowered("specontext", ideal, context=65536)[0]
    projected_s = held.target.projected_params * 2 / 1e12
    assert projected_s > 0
    for gamma in (0, 3):
        changed = held.with_terms(gamma=gamma)
        free = changed.with_terms(target_projected_params=0)
        paid_s, free_s = (target_choice_seconds(SHAPE, ideal, each, 65536) for each in (changed, free))
        assert paid_s - free_s == pytest.approx(projected_s)


@pytest.mark.parametrize(
    ("model", "name", "share", "rows", "extra"),
    [
        ("Qwen/Qwen3-30B-A3B", "autoregressive", PROMPT_EXPERTS_SHARE[16], 512, GROUPED_EXTRA_ROWS[16]),
        ("Qwen/Qwen3-30B-A3B", "int8-weights", PROMPT_EXPERTS_SHARE[8], 512, GROUPED_EXTRA_ROWS[8]),
        ("Qwen/Qwen3-30B-A3B", "int4-weights", PROMPT_EXPERTS_SHARE[4], 512, GROUPED_EXTRA_ROWS[4]),
        ("openai/gpt-oss-20b", "int8-weights", PROMPT_MXFP4_SHARE, 1024, GROUPED_MXFP4_EXTRA_ROWS),
    ],
)
def test_experts_of_prompts_reach_a_share_of_the_dense_library(ideal, model, name, share, rows, extra):
    """In Triton; in grouped products on Hopper by the rows of an expert among 8192, 8 of 128 or 4 of 32 of a token's.

    A CPU multiplies by each expert as by any matrix.
    """
    shape, plan = load_shape(model), preset(name, Workload(model, "h200", 8192))
    hopper, cpu = replace(ideal, grouped_experts=1), replace(ideal, asynchronous=0)
    for machine, expected in ((ideal, share), (hopper, rows / (rows + extra)), (cpu, 1)):
        rates = prefill_rates(shape, machine, strategy_of(plan, shape, machine, 1.0))
        experts, dense = rates["grouped_linear"], rates["linear"]
        assert experts.compute_utilization == pytest.approx(expected * dense.compute_utilization)
        assert experts.spread >= PROMPT_EXPERTS_SPREAD > dense.spread


@pytest.mark.parametrize(("context", "grouped"), [(511, False), (512, True)])
def test_grouped_products_take_32_rows_of_each_expert(ideal, context, grouped):
    """Of 128 experts, of which a token has 8: shorter prompts run in Triton, and copy nothing."""
    shape = load_shape("Qwen/Qwen3-30B-A3B")
    machine = replace(ideal, grouped_experts=1)
    strategy = strategy_of(preset("int8-weights", Workload(shape.name, "h200", context)), shape, machine, 1.0)
    rates = prefill_rates(shape, machine, strategy)
    share = rates["grouped_linear"].compute_utilization / rates["linear"].compute_utilization
    assert share == pytest.approx(32 / (32 + GROUPED_EXTRA_ROWS[8]) if grouped else PROMPT_EXPERTS_SHARE[8])
    without = replace(strategy, target=replace(strategy.target, copies_experts=0))
    memory = [resident_memory(shape, machine, each).prefill_workspace for each in (strategy, without)]
    assert (memory[0] > memory[1]) == grouped
