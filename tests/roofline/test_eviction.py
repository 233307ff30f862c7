"""What an eviction costs in prefill: counted by hand for Llama-3.1-8B (32 layers, 32 query and 8 KV heads of 128)."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import eviction_ops, prefill_launches, prefill_ops, prefill_seconds
from ridgeplan.roofline.execution import HELD_ATTENTION_SHARE, SHORT_ATTENTION_SHARE
from ridgeplan.roofline.memory import chunk_buffers, eviction_workspace, resident_memory
from ridgeplan.roofline.plan.plan import Eviction, KVCache, KVFormat, Plan, Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import prefill_rates

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
    assert strategy.scored_pairs == pairs
    scores, softmax = eviction_ops(shape, strategy, 2)[2:4]
    assert scores.cost.flops * scores.launches == pytest.approx(32 * 32 * 2 * 128 * pairs)  # layers, heads
    # bf16 logits are read, fp32 probabilities written and read; and the ranking.
    ranked = 32 * 8 * CONTEXT * 80 * strategy.evicts
    assert softmax.cost.bytes * softmax.launches == pytest.approx(32 * 32 * 10 * pairs + ranked)


def test_pseudo_tokens_are_one_more_chunk(shape, ideal):
    plain, dapq = lowered("snapkv", shape, ideal), lowered("dapq", shape, ideal)
    assert (plain.appended_tokens, dapq.appended_tokens) == (0, 32)
    assert (prefill_launches(ideal, plain), prefill_launches(ideal, dapq)) == (8, 9)
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
    full = Eviction(name, share=1.0)
    evicting, plain = lowered(name, shape, ideal, eviction=full), lowered("autoregressive", shape, ideal)
    assert (evicting.evicts, evicting.appended_tokens, evicting.scored_pairs) == (0, 0, 0)
    assert prefill_seconds(shape, ideal, evicting) == prefill_seconds(shape, ideal, plain)
    assert resident_memory(shape, ideal, evicting) == resident_memory(shape, ideal, plain)


def test_memory_is_what_stays_and_one_layers_kv(shape, ideal):
    """8192 of 32768 tokens stay. The prompt's buffers, of one layer, are those of plain decoding."""
    quarter = lowered("snapkv", shape, ideal, eviction=Eviction("snapkv", share=0.25))
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
    plan = Plan(Workload("Llama-3.1-8B", "h200", 1500), eviction=Eviction("pyramidkv", 1024))
    # Layers with budgets above the prompt of 1500 keep 1500.
    assert strategy_of(plan, shape, ideal, 1.0).kept_tokens < 1024


def test_only_what_stays_is_quantized(shape, ideal):
    """1024 tokens a layer: read in bf16, written as codes of 8 bits with scales and minima (2112 bytes a token)."""
    plain, coded = (
        prefill_seconds(shape, ideal, lowered("snapkv", shape, ideal, kv=KVCache(kv)))
        for kv in (KVFormat.FULL, KVFormat.INT8)
    )
    assert coded - plain == pytest.approx(32 * 1024 * (TOKEN + 2112) / 1e12, rel=1e-3)


# What prompts cost that go through in chunks: by hand for Llama-3.1-8B (32 layers, 32 query and 8 KV heads of 128).

CHUNKED_CONTEXT, CHUNK, BUDGET = 131072, 4096, 1024
ACTIVATED = 4096 * (2 * 4096 + 3 * 14336) * 2  # bytes of a chunk's activations in the MLP


@pytest.fixture
def in_chunks(shape, ideal):
    def make(policy="snapkv", context=CHUNKED_CONTEXT, budget=BUDGET, chunk=CHUNK, kv=KVFormat.FULL, settings=None):
        eviction = Eviction(policy, budget, chunk=chunk, settings=settings or {})
        plan = Plan(Workload("Llama-3.1-8B", "h200", context), kv=KVCache(kv), eviction=eviction)
        return strategy_of(plan, shape, ideal, 1.0)

    return make


def held_between(context, budget, chunks):
    """What a layer holds before each chunk."""
    size = context / chunks
    return [min(index * size, budget) for index in range(chunks)]


@pytest.mark.parametrize(
    "context, budget, chunk, count, evicting",
    [
        (131072, 1024, 4096, 32, 32),
        (131072, 8192, 4096, 32, 30),  # two chunks fill the budget, and evict nothing
        (131072, 10000, 4096, 32, 30),
        (100000, 1024, 4096, 25, 25),  # chunks of 4000
        (4096, 1024, 4096, 1, 1),
        (8192, 6000, 4096, 2, 1),
    ],
)
def test_chunks_by_hand(context, budget, chunk, count, evicting, in_chunks):
    chunks = in_chunks(context=context, budget=budget, chunk=chunk).prompt_chunks
    assert (chunks.count, chunks.evicting, chunks.tokens) == (count, evicting, context / count)
    assert chunks.held == pytest.approx(sum(held_between(context, budget, count)) / count)
    assert chunks.candidates == min(budget + context / count, context)
    assert chunks.longest == -(-context // count)


@pytest.mark.parametrize("policy", ["snapkv", "dapq", "streamingllm"])
@pytest.mark.parametrize("changes", [{"chunk": 0}, {"chunk": CHUNKED_CONTEXT}, {"budget": CHUNKED_CONTEXT}])
def test_what_is_at_once_costs_what_it_did(policy, changes, in_chunks, shape, ideal):
    """Without a chunk, with one of the whole context, and where nothing is evicted."""
    full, same = (
        in_chunks(policy, **({"chunk": 0} | changes)),
        in_chunks(policy, **(changes | {"chunk": CHUNKED_CONTEXT})),
    )
    assert prefill_seconds(shape, ideal, full) == prefill_seconds(shape, ideal, same)
    assert resident_memory(shape, ideal, full) == resident_memory(shape, ideal, same)


def test_attention_is_to_what_layers_hold_and_the_chunk(in_chunks, shape, ideal):
    ops = {op.name: op for op in prefill_ops(shape, ideal, in_chunks())}
    pairs = sum(CHUNK * held + CHUNK**2 / 2 for held in held_between(CHUNKED_CONTEXT, BUDGET, 32))
    assert ops["prefill attention"].total.flops == pytest.approx(32 * 32 * 4 * 128 * pairs)
    read = 32 * sum(CHUNK * 32 * 128 * 2 + (held + CHUNK) * TOKEN for held in held_between(CHUNKED_CONTEXT, BUDGET, 32))
    assert ops["prefill attention"].total.read_bytes == pytest.approx(read)
    assert ops["lm head"].launches == 1
    # Every chunk reads all weights; the products are those of all tokens.
    linear = [op.total for op in ops.values() if op.kind == "linear" and op.name not in ("eviction scores",)]
    matrices = memory.layer_parameters(shape)
    assert sum(op.flops for op in linear) == pytest.approx(2 * CHUNKED_CONTEXT * matrices)
    # 31 chunks have 1024 tokens copied ahead of them.
    assert ops["held tokens"].total.bytes == pytest.approx(32 * 31 * 2 * BUDGET * TOKEN)


def test_chunks_that_attend_to_held_tokens_compute_slower(in_chunks, shape, ideal):
    """All of 16 chunks but the first, by FlashAttention, and all of 32, which are too short for cuDNN."""
    cudnn = ideal.rates["prefill_attention"].compute_utilization
    for context, chunk, slower in (
        (2 * CHUNK, 2 * CHUNK, 1), (CHUNKED_CONTEXT, 2 * CHUNK, (1 + 15 / HELD_ATTENTION_SHARE) / 16),
        (CHUNK, CHUNK, 1 / SHORT_ATTENTION_SHARE),
        (CHUNKED_CONTEXT, CHUNK, (1 / SHORT_ATTENTION_SHARE + 31 / HELD_ATTENTION_SHARE) / 32),
    ):  # fmt: skip
        rates = prefill_rates(shape, ideal, in_chunks(context=context, chunk=chunk))["prefill_attention"]
        assert cudnn / rates.compute_utilization == pytest.approx(slower)


def test_scores_and_pseudo_tokens_are_of_every_chunk_that_evicts(in_chunks, shape, ideal):
    strategy = in_chunks("dapq", budget=8192)
    tokens = 8192 + CHUNK + 32
    assert strategy.scored_pairs == 32 * tokens - 32**2 / 2
    assert prefill_launches(ideal, strategy) == 32 + 30
    products, attention, scores, _, copy, _ = eviction_ops(shape, strategy, 2)
    assert products.total.flops == pytest.approx(30 * 2 * 32 * memory.layer_parameters(shape))
    assert attention.total.read_bytes == pytest.approx(30 * 32 * tokens * TOKEN, rel=0.05)
    assert scores.total.flops == pytest.approx(30 * 32 * 32 * 2 * 128 * strategy.scored_pairs)
    assert copy.total.bytes == pytest.approx(30 * 32 * 4 * 8192 * TOKEN)


def test_memory_does_not_grow_with_the_prompt(in_chunks, shape, ideal):
    """A chunk's hidden states and queries, one layer's KV of the budget and the chunk, and an MLP's activations."""
    workspace = CHUNK * 4096 * 2 * 2 + (CHUNK + BUDGET) * TOKEN + ACTIVATED
    for context in (CHUNKED_CONTEXT, 1 << 20, 1 << 23):
        parts = resident_memory(shape, ideal, in_chunks(context=context))
        assert parts.prefill_workspace == workspace
        assert parts.kv == 32 * (BUDGET + 1024 + 1) * TOKEN
    full = resident_memory(shape, ideal, in_chunks(chunk=0)).prefill_workspace
    assert full > CHUNKED_CONTEXT * (4096 * 2 * 2 + TOKEN)


@pytest.mark.parametrize("kv", [KVFormat.INT8, KVFormat.HIERARCHICAL])
def test_codes_are_made_of_full_precision_that_all_layers_hold_until_the_end(kv, in_chunks, shape, ideal):
    full, coded = (resident_memory(shape, ideal, in_chunks(kv=kv_format)) for kv_format in (KVFormat.FULL, kv))
    assert coded.prefill_workspace - full.prefill_workspace == 32 * BUDGET * TOKEN
    assert len(chunk_buffers(shape, in_chunks(kv=kv), 2)) == 5


def test_the_copy_of_what_stays_can_be_the_largest_of_an_evictions_workspace(in_chunks, shape):
    assert eviction_workspace(shape, in_chunks(budget=65536, chunk=256), 2) == 65536 * TOKEN


def test_long_prompts_start_sooner_in_chunks(in_chunks, shape, ideal):
    """Attention no longer grows with the square of the prompt."""
    seconds, chunked = (prefill_seconds(shape, ideal, in_chunks(context=1 << 20, chunk=chunk)) for chunk in (0, CHUNK))
    assert chunked < seconds / 5
    doubled = prefill_seconds(shape, ideal, in_chunks(context=1 << 21))
    assert doubled == pytest.approx(2 * chunked, rel=0.01)


def test_many_strategies_at_once_cost_what_each_does_alone(in_chunks, shape, ideal):
    chunks, contexts = np.array([CHUNK, 1 << 40, 1000.0]), np.array([CHUNKED_CONTEXT, 4096.0, 70000.0])
    together = in_chunks().with_terms(eviction_chunk=chunks, context=contexts)
    seconds = prefill_seconds(shape, ideal, together), resident_memory(shape, ideal, together).prefill_workspace
    for index, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
        single = in_chunks().with_terms(eviction_chunk=chunk, context=context)
        assert seconds[0][index] == pytest.approx(prefill_seconds(shape, ideal, single))
        assert seconds[1][index] == pytest.approx(resident_memory(shape, ideal, single).prefill_workspace)
