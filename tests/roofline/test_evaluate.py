"""Latency of whole strategies: against sums over every step, and against what a hand adds up."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.lowering import rates_of, strategy_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import at_acceptance, evaluate, pass_ops, prefill_ops, prefill_seconds
from ridgeplan.roofline.latency import Machine, RateTerms
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import round_at, round_rates

LLAMA = load_shape("Llama-3.1-8B")
KV_BYTES = 131_072  # of a token: 32 layers x 2 x 8 heads x 128 elements x 2 bytes
LINEAR_PARAMETERS = 7_504_658_432  # 8,030,261,248 less the input table of 128,256 x 4096 and 65 norms of 4096


def lowered(name, machine, shape=LLAMA, acceptance=0.9, **workload):
    plan = preset(name, Workload("m", "h200", **{"context": 4096, "new_tokens": 1024, **workload}))
    return strategy_of(plan, shape, machine, acceptance), rates_of(plan, shape, machine)


def test_a_plain_step_moves_the_weights_and_the_cache(ideal):
    """Halfway through the generation, 4608 tokens; activations are less than 1% of it."""
    estimate = evaluate(LLAMA, ideal, *lowered("autoregressive", ideal))
    moved_bytes = 2 * LINEAR_PARAMETERS + 4608 * KV_BYTES
    assert moved_bytes / 1e12 < estimate.tpot_s < 1.01 * moved_bytes / 1e12
    assert estimate.tokens_per_round == 1


def test_a_batch_shares_the_weights(ideal):
    single, four = (evaluate(LLAMA, ideal, *lowered("autoregressive", ideal, batch=batch)).tpot_s for batch in (1, 4))
    assert four - single == pytest.approx(3 * 4608 * KV_BYTES / 1e12, rel=0.03)


# Costs have kinks where the budget or the buffer is full: there, two nodes are within 5% of the mean over all steps.
@pytest.mark.parametrize("name", ["autoregressive", "quantspec", "quest"])
def test_a_round_is_the_mean_over_the_generation(ideal, name):
    shape = replace(LLAMA, intermediate=64, vocab=64, hidden=64)  # attention decides
    strategy, rates = lowered(name, ideal, shape, context=400, new_tokens=2000)
    strategy = strategy.with_terms(target_budget=np.minimum(strategy.target.budget, 800))
    steps = (strategy.context + (step + 0.5) / 500 * strategy.new_tokens for step in range(500))
    rounds = [
        round_at(shape, ideal, strategy, round_rates(shape, ideal, strategy, rates), context) for context in steps
    ]
    round_costs = evaluate(shape, ideal, strategy, rates).round
    for part in ("draft_s", "verify_s", "accept_s", "select_s", "flush_s", "total_s"):
        mean = np.mean([getattr(round_estimate, part) for round_estimate in rounds])
        assert getattr(round_costs, part) == pytest.approx(mean, rel=0.05), part


def test_tpot_is_a_round_over_its_tokens(ideal):
    estimate = evaluate(LLAMA, ideal, *lowered("quantspec-exact", ideal, acceptance=0.5))
    assert estimate.tokens_per_round == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert estimate.tpot_s == pytest.approx(estimate.round.total_s / 1.9375)
    round_estimate = estimate.round
    parts = (
        4 * round_estimate.draft_s
        + round_estimate.verify_s
        + round_estimate.accept_s
        + round_estimate.select_s
        + round_estimate.flush_s
    )
    assert round_estimate.total_s == pytest.approx(parts)
    assert (
        min(round_estimate.draft_s, round_estimate.verify_s, round_estimate.accept_s, round_estimate.flush_s)
        > 0
        == round_estimate.select_s
    )


def test_plain_decoding_drafts_selects_and_flushes_nothing(ideal):
    round_estimate = evaluate(LLAMA, ideal, *lowered("autoregressive", ideal)).round
    assert (round_estimate.draft_s, round_estimate.select_s, round_estimate.flush_s) == (0, 0, 0)
    assert round_estimate.total_s == round_estimate.verify_s + round_estimate.accept_s


def test_layers_are_launched_once_a_chunk_of_4096_tokens(ideal):
    """A host that takes 1 ms a layer, beside a device that takes no time: 32 layers of each chunk."""
    instant = replace(ideal, bandwidth_bytes_per_s=1e30, compute_flops=1e30, prefill_layer_dispatch_s=1e-3)
    for context, chunks in ((100, 1), (4096, 1), (16384, 4), (32768, 8)):
        strategy, _ = lowered("autoregressive", instant, context=context)
        assert prefill_seconds(LLAMA, instant, strategy) == pytest.approx(32e-3 * chunks)


@pytest.mark.parametrize(("name", "launches"), [("autoregressive", 14), ("int8", 16), ("quantspec-int8", 20)])
def test_codes_of_weights_and_of_kv_launch_more(name, launches, ideal):
    """A copy of each of the four products' weights, and the quantization with its first group's index."""
    instant = replace(ideal, bandwidth_bytes_per_s=1e30, compute_flops=1e30, prefill_layer_dispatch_s=14e-3)
    strategy, _ = lowered(name, instant, context=1000)
    assert prefill_seconds(LLAMA, instant, strategy) == pytest.approx(32e-3 * launches)


def test_prompts_are_processed_one_after_another(ideal):
    """Each with its quantization: codes of 8.25 bits an element are written for 4096 tokens in 32 layers."""
    slow = replace(ideal, rates={**ideal.rates, "quantize": RateTerms(1e-3, 1.0, 0.0)})
    for batch in (1, 3):
        plain, coded = (
            prefill_seconds(LLAMA, slow, lowered(name, slow, batch=batch)[0]) for name in ("autoregressive", "int8")
        )
        read, written = 4096 * KV_BYTES, 4096 * KV_BYTES / 16 * 8.25
        assert coded - plain == pytest.approx(batch * (read + written) / 1e9)
        seconds = prefill_seconds(LLAMA, slow, lowered("autoregressive", slow)[0])
        assert plain == pytest.approx(batch * seconds)


@pytest.mark.parametrize("batch", [1, 3])
def test_draft_weights_are_restored_once_after_the_last_prompt(ideal, batch):
    """Prompts overwrote hidden states and queries of 4096, and keys and values of 1024, in 2 bytes: over 10 GB/s."""
    instant = replace(ideal, bandwidth_bytes_per_s=1e30, compute_flops=1e30)
    strategy, _ = lowered("quantspec", instant, context=131_072, batch=batch)
    assert prefill_seconds(LLAMA, instant, strategy) == pytest.approx(131_072 * 2 * (4096 + 4096 + 2 * 1024) / 1e10)


def test_prefill_of_a_long_prompt_is_bound_by_its_flops(ideal):
    """2 FLOPs per linear parameter and token (the head but once), and 32 layers of causal attention."""
    fast = replace(ideal, bandwidth_bytes_per_s=1e15)
    strategy, _ = lowered("autoregressive", fast, context=32768)
    head = 128_256 * 4096
    flops = 2 * (LINEAR_PARAMETERS - head) * 32768 + 32 * 4 * 4096 * 32768**2 / 2
    assert prefill_seconds(LLAMA, fast, strategy) == pytest.approx(flops / 1e15, rel=0.01)


def test_the_breakdown_is_taken_halfway_through_the_generation(ideal):
    ops = pass_ops(LLAMA, ideal, lowered("autoregressive", ideal)[0])
    assert set(ops) == {"prefill", "draft", "target"}
    attention = next(op for op in ops["target"] if op.name == "attention")
    # 4608 tokens in the cache and the one of the step; 32 heads, each with a merge of its 18 splits
    splits = 16  # of 256 tokens of the prompt
    assert attention.cost.flops == 4 * 4096 * 4609 + 2 * 4096 * splits


def test_quantized_targets_are_copied_in_every_chunk_of_a_prompt(ideal):
    """Llama-3.1-8B has 6.98 billion parameters in layers: 0.53125 bytes read and 2 written of each, three times."""
    plan = preset("int4-weights", Workload("Llama-3.1-8B", "h200", 3 * 4096))
    shape = load_shape("Llama-3.1-8B")
    strategy = strategy_of(plan, shape, ideal, 1.0)
    (copies,) = (op for op in prefill_ops(shape, ideal, strategy) if op.name == "dense copies")
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert copies.total.bytes == pytest.approx(3 * 32 * layer * (0.5 + 4 / 128 + 2))
    for none in (strategy.with_terms(target_dense=1), strategy):
        machine = ideal if none.target.dense else replace(ideal, asynchronous=0)
        assert prefill_ops(shape, machine, none)[-1].launches == 0


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_experts_of_prompts_are_read_as_they_are_in_every_piece(ideal, name):
    """Two pieces of 4096 tokens: copies of attention's projections alone, and 128 or 32 experts read twice a layer."""
    plan, shape = preset("int8-weights", Workload(name, "h200", 8192)), load_shape(name)
    ops = {op.name: op for op in prefill_ops(shape, ideal, strategy_of(plan, shape, ideal, 1.0))}
    projections, expert, layers, bytes_each = {
        "Qwen/Qwen3-30B-A3B": (2048 * (2 * 4096 + 2 * 512), 3 * 2048 * 768, 48, 1.0625),
        "openai/gpt-oss-20b": (2880 * (2 * 4096 + 2 * 512), 3 * 2880 * 2880, 24, 0.53125),
    }[name]
    assert ops["dense copies"].total.bytes == pytest.approx(2 * layers * projections * (1.0625 + 2))
    routed, rows_bytes = ops["routed experts"], 4096 * shape.hidden * 2
    assert routed.launches == 2 * layers
    assert routed.cost.read_bytes == pytest.approx(shape.experts * expert * bytes_each + rows_bytes)
    assert routed.total.flops == pytest.approx(2 * 8192 * shape.experts_per_token * expert * layers)


def test_another_acceptance_needs_no_evaluation(h200_profile):
    shape, machine = load_shape("Llama-3.1-8B"), Machine.of(h200_profile)
    plan = preset("quantspec", Workload("Llama-3.1-8B", "h200", 20000))
    strategy, rates = strategy_of(plan, shape, machine, 0.7), rates_of(plan, shape, machine)
    other = replace(strategy, acceptance=0.95)
    evaluated, derived = (
        evaluate(shape, machine, other, rates), at_acceptance(evaluate(shape, machine, strategy, rates), other)
    )  # fmt: skip
    assert derived.tpot_s == pytest.approx(evaluated.tpot_s, rel=1e-12)
    assert derived.round.flush_s == pytest.approx(evaluated.round.flush_s, rel=1e-12)


@pytest.mark.parametrize(("asynchronous", "slower"), [(0, 2.0), (1, 1.0)], ids=["a CPU", "a GPU"])
def test_prompts_meet_the_targets_codes_on_a_cpu_and_dense_copies_on_a_gpu(ideal, asynchronous, slower):
    """Products by codes at half of the rate of dense ones, where nothing but FLOPs takes time."""
    rates = {**ideal.rates, "linear_int8": RateTerms(1.0, 0.5, 0.0)}
    machine = replace(ideal, asynchronous=asynchronous, bandwidth_bytes_per_s=1e18, rates=rates)
    plain_s, coded_s = (
        evaluate(LLAMA, machine, *lowered(name, machine)).ttft_s for name in ("autoregressive", "int8-weights")
    )
    attention_s = 32 * 4 * 4096 * 4096**2 / 2 / 1e15
    assert coded_s - attention_s == pytest.approx(slower * (plain_s - attention_s), rel=0.01)
