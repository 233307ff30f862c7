"""What an eviction costs in prefill: counted by hand for Llama-3.1-8B (32 layers, 32 query and 8 KV heads of 128)."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import prefill_chunks, prefill_seconds
from ridgeplan.roofline.eviction import appended_tokens, eviction_ops, eviction_workspace, evicts, scored_pairs
from ridgeplan.roofline.placement import resident_memory
from ridgeplan.roofline.plan.plan import Eviction, EvictionPolicy, KVCache, KVFormat, Plan, Workload
from ridgeplan.roofline.plan.presets import preset

CONTEXT = 32768
TOKEN = 2 * 8 * 128 * 2  # bytes of a layer's keys and values


@pytest.fixture(scope="module")
def shape():
    return load_shape("Llama-3.1-8B")


def lowered(name, shape, device, context=CONTEXT, **changes):
    plan = preset(name, Workload("Llama-3.1-8B", "h200", context))
    return strategy_of(replace(plan, **changes), shape, device, 1.0)


@pytest.mark.parametrize(
    "name, pairs",
    [
        ("autoregressive", 0),
        ("streamingllm", 0),
        ("lacache", 0),
        ("snapkv", 32 * CONTEXT - 32**2 / 2),  # the last 32 tokens see all before them, and half of themselves
        ("pyramidkv", 32 * CONTEXT - 32**2 / 2),
        ("dapq", 32 * (CONTEXT + 32) - 32**2 / 2),
        ("h2o", CONTEXT**2 / 2),
    ],
)
def test_pairs_of_a_scoring_query_and_a_token(name, pairs, shape, ideal):
    strategy = lowered(name, shape, ideal)
    assert scored_pairs(strategy) == pairs
    scores, softmax = eviction_ops(shape, strategy, 2)[2:4]
    assert scores.cost.flops * scores.launches == pytest.approx(32 * 32 * 2 * 128 * pairs)  # layers, heads
    # bf16 logits are read, fp32 probabilities written and read; and the ranking.
    ranked = 32 * 8 * CONTEXT * 80 * evicts(strategy)
    assert softmax.cost.bytes * softmax.launches == pytest.approx(32 * 32 * 10 * pairs + ranked)


def test_pseudo_tokens_are_one_more_chunk(shape, ideal):
    plain, dapq = lowered("snapkv", shape, ideal), lowered("dapq", shape, ideal)
    assert (appended_tokens(plain), appended_tokens(dapq)) == (0, 32)
    assert (prefill_chunks(plain), prefill_chunks(dapq)) == (8, 9)
    products, attention = eviction_ops(shape, dapq, 2)[:2]
    matrices = memory.layer_parameters(shape)
    assert products.total.flops == pytest.approx(2 * 32 * matrices)
    assert products.total.read_bytes == pytest.approx(2 * matrices, rel=0.01)
    assert attention.total.read_bytes == pytest.approx(32 * (CONTEXT + 32) * TOKEN, rel=0.05)
    assert eviction_ops(shape, plain, 2)[0].launches == 0


def test_dapqs_first_token_comes_less_than_2_percent_after_snapkvs(shape, ideal):
    for context in (32768, 131072):
        snapkv, dapq = (
            prefill_seconds(shape, ideal, lowered(name, shape, ideal, context)) for name in ("snapkv", "dapq")
        )
        assert snapkv < dapq < 1.02 * snapkv


@pytest.mark.parametrize("name", ["dapq", "h2o", "pyramidkv"])
def test_a_budget_of_the_whole_context_costs_nothing(name, shape, ideal):
    whole = Eviction(EvictionPolicy(name), share=1.0)
    evicting, plain = lowered(name, shape, ideal, eviction=whole), lowered("autoregressive", shape, ideal)
    assert (evicts(evicting), appended_tokens(evicting), scored_pairs(evicting)) == (0, 0, 0)
    assert prefill_seconds(shape, ideal, evicting) == prefill_seconds(shape, ideal, plain)
    assert resident_memory(shape, ideal, evicting) == resident_memory(shape, ideal, plain)


def test_memory_is_what_stays_and_one_layers_kv(shape, ideal):
    """8192 of 32768 tokens stay. The prompt's buffers, of one layer, are those of plain decoding."""
    quarter = lowered("snapkv", shape, ideal, eviction=Eviction(EvictionPolicy.SNAPKV, share=0.25))
    evicted, plain = (
        resident_memory(shape, ideal, each) for each in (quarter, lowered("autoregressive", shape, ideal))
    )
    assert evicted.kv == 32 * (8192 + 1024 + 1) * TOKEN
    assert plain.kv == 32 * (32768 + 1024 + 1) * TOKEN
    assert evicted.prefill_workspace == plain.prefill_workspace


def test_a_block_of_scores_is_64_mib_or_one_query_of_a_kv_head(shape, ideal):
    assert eviction_workspace(shape, lowered("snapkv", shape, ideal), 2) == 4 * 32 * CONTEXT * 6
    assert eviction_workspace(shape, lowered("h2o", shape, ideal), 2) == (1 << 24) * 6
    assert eviction_workspace(shape, lowered("streamingllm", shape, ideal), 2) == 8 * CONTEXT * 40
    assert eviction_workspace(shape, lowered("autoregressive", shape, ideal), 2) == 0
    long = lowered("h2o", shape, ideal, context=1 << 23)
    assert eviction_workspace(shape, long, 2) == 8 * (1 << 23) * 40


def test_the_mean_of_layers_budgets_is_what_decoding_reads(shape, ideal):
    strategy = lowered("pyramidkv", shape, ideal)
    assert strategy.kept_tokens == pytest.approx(1024, abs=1)
    plan = Plan(Workload("Llama-3.1-8B", "h200", 1500), eviction=Eviction(EvictionPolicy.PYRAMIDKV, 1024))
    # Layers with budgets above the prompt of 1500 keep 1500.
    assert strategy_of(plan, shape, ideal, 1.0).kept_tokens < 1024


def test_only_what_stays_is_quantized(shape, ideal):
    """1024 tokens a layer: read in bf16, written as codes of 8 bits with scales and minima (2112 bytes a token)."""
    plain, coded = (
        prefill_seconds(shape, ideal, lowered("snapkv", shape, ideal, kv=KVCache(kv)))
        for kv in (KVFormat.FULL, KVFormat.INT8)
    )
    assert coded - plain == pytest.approx(32 * 1024 * (TOKEN + 2112) / 1e12, rel=1e-3)
