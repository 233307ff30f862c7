"""What prompts cost that go through in chunks: by hand for Llama-3.1-8B (32 layers, 32 query and 8 KV heads of 128)."""

import numpy as np
import pytest

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.evaluate import prefill_chunks, prefill_ops, prefill_seconds
from ridgeplan.roofline.eviction import PromptChunks, chunk_buffers, eviction_ops, eviction_workspace, scored_pairs
from ridgeplan.roofline.execution import HELD_ATTENTION_SHARE
from ridgeplan.roofline.placement import resident_memory
from ridgeplan.roofline.plan.plan import Eviction, EvictionPolicy, KVCache, KVFormat, Plan, Workload
from ridgeplan.roofline.round import prefill_rates

CONTEXT, CHUNK, BUDGET = 131072, 4096, 1024
TOKEN = 2 * 8 * 128 * 2  # bytes of a layer's keys and values
ACTIVATED = 4096 * (2 * 4096 + 3 * 14336) * 2  # bytes of a chunk's activations in the MLP


@pytest.fixture(scope="module")
def shape():
    return load_shape("Llama-3.1-8B")


@pytest.fixture
def lowered(shape, ideal):
    def make(policy="snapkv", context=CONTEXT, budget=BUDGET, chunk=CHUNK, kv=KVFormat.FULL, settings=None):
        eviction = Eviction(EvictionPolicy(policy), budget, chunk=chunk, settings=settings or {})
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
def test_chunks_by_hand(context, budget, chunk, count, evicting, lowered):
    found = PromptChunks.of(lowered(context=context, budget=budget, chunk=chunk))
    assert (found.count, found.evicting, found.tokens) == (count, evicting, context / count)
    assert found.held == pytest.approx(sum(held_between(context, budget, count)) / count)
    assert found.chosen_from == min(budget + context / count, context)
    assert found.longest == -(-context // count)


@pytest.mark.parametrize("policy", ["snapkv", "dapq", "streamingllm"])
@pytest.mark.parametrize("changes", [{"chunk": 0}, {"chunk": CONTEXT}, {"budget": CONTEXT}])
def test_what_is_at_once_costs_what_it_did(policy, changes, lowered, shape, ideal):
    """Without a chunk, with one of the whole context, and where nothing is evicted."""
    whole, same = lowered(policy, **({"chunk": 0} | changes)), lowered(policy, **(changes | {"chunk": CONTEXT}))
    assert prefill_seconds(shape, ideal, whole) == prefill_seconds(shape, ideal, same)
    assert resident_memory(shape, ideal, whole) == resident_memory(shape, ideal, same)


def test_attention_is_to_what_layers_hold_and_the_chunk(lowered, shape, ideal):
    ops = {op.name: op for op in prefill_ops(shape, ideal, lowered())}
    pairs = sum(CHUNK * held + CHUNK**2 / 2 for held in held_between(CONTEXT, BUDGET, 32))
    assert ops["prefill attention"].total.flops == pytest.approx(32 * 32 * 4 * 128 * pairs)
    read = 32 * sum(CHUNK * 32 * 128 * 2 + (held + CHUNK) * TOKEN for held in held_between(CONTEXT, BUDGET, 32))
    assert ops["prefill attention"].total.read_bytes == pytest.approx(read)
    assert ops["lm head"].launches == 1
    # Every chunk reads all weights; the products are those of all tokens.
    linear = [op.total for op in ops.values() if op.kind == "linear" and op.name not in ("eviction scores",)]
    matrices = memory.layer_parameters(shape)
    assert sum(one.flops for one in linear) == pytest.approx(2 * CONTEXT * matrices)
    # 31 chunks have 1024 tokens copied ahead of them.
    assert ops["held tokens"].total.bytes == pytest.approx(32 * 31 * 2 * BUDGET * TOKEN)


def test_chunks_that_attend_to_held_tokens_compute_slower(lowered, shape, ideal):
    """All of 32 chunks but the first, by FlashAttention; one chunk as a prompt at once."""
    utilization = [
        prefill_rates(shape, ideal, lowered(context=context))["prefill_attention"].compute_utilization
        for context in (CHUNK, CONTEXT)
    ]
    assert utilization[0] == ideal.rates["prefill_attention"].compute_utilization
    assert utilization[0] / utilization[1] == pytest.approx((1 + 31 / HELD_ATTENTION_SHARE) / 32)


def test_scores_and_pseudo_tokens_are_of_every_chunk_that_evicts(lowered, shape):
    strategy = lowered("dapq", budget=8192)
    tokens = 8192 + CHUNK + 32
    assert scored_pairs(strategy) == 32 * tokens - 32**2 / 2
    assert prefill_chunks(strategy) == 32 + 30
    products, attention, scores, _, copy, _ = eviction_ops(shape, strategy, 2)
    assert products.total.flops == pytest.approx(30 * 2 * 32 * memory.layer_parameters(shape))
    assert attention.total.read_bytes == pytest.approx(30 * 32 * tokens * TOKEN, rel=0.05)
    assert scores.total.flops == pytest.approx(30 * 32 * 32 * 2 * 128 * scored_pairs(strategy))
    assert copy.total.bytes == pytest.approx(30 * 32 * 4 * 8192 * TOKEN)


def test_memory_does_not_grow_with_the_prompt(lowered, shape, ideal):
    """A chunk's hidden states and queries, one layer's KV of the budget and the chunk, and an MLP's activations."""
    workspace = CHUNK * 4096 * 2 * 2 + (CHUNK + BUDGET) * TOKEN + ACTIVATED
    for context in (CONTEXT, 1 << 20, 1 << 23):
        parts = resident_memory(shape, ideal, lowered(context=context))
        assert parts.prefill_workspace == workspace
        assert parts.kv == 32 * (BUDGET + 1024 + 1) * TOKEN
    whole = resident_memory(shape, ideal, lowered(chunk=0)).prefill_workspace
    assert whole > CONTEXT * (4096 * 2 * 2 + TOKEN)


@pytest.mark.parametrize("kv", [KVFormat.INT8, KVFormat.HIERARCHICAL])
def test_codes_are_made_of_full_precision_that_all_layers_hold_until_the_end(kv, lowered, shape, ideal):
    full, coded = (resident_memory(shape, ideal, lowered(kv=one)) for one in (KVFormat.FULL, kv))
    assert coded.prefill_workspace - full.prefill_workspace == 32 * BUDGET * TOKEN
    assert len(chunk_buffers(shape, lowered(kv=kv), 2)) == 5


def test_the_copy_of_what_stays_can_be_the_largest_of_an_evictions_workspace(lowered, shape):
    assert eviction_workspace(shape, lowered(budget=65536, chunk=256), 2) == 65536 * TOKEN


def test_long_prompts_start_sooner_in_chunks(lowered, shape, ideal):
    """Attention no longer grows with the square of the prompt."""
    whole, chunked = (prefill_seconds(shape, ideal, lowered(context=1 << 20, chunk=chunk)) for chunk in (0, CHUNK))
    assert chunked < whole / 5
    doubled = prefill_seconds(shape, ideal, lowered(context=1 << 21))
    assert doubled == pytest.approx(2 * chunked, rel=0.01)


def test_many_strategies_at_once_cost_what_each_does_alone(lowered, shape, ideal):
    chunks, contexts = np.array([CHUNK, 1 << 40, 1000.0]), np.array([CONTEXT, 4096.0, 70000.0])
    together = lowered().with_terms(eviction_chunk=chunks, context=contexts)
    found = prefill_seconds(shape, ideal, together), resident_memory(shape, ideal, together).prefill_workspace
    for index, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
        alone = lowered().with_terms(eviction_chunk=chunk, context=context)
        assert found[0][index] == pytest.approx(prefill_seconds(shape, ideal, alone))
        assert found[1][index] == pytest.approx(resident_memory(shape, ideal, alone).prefill_workspace)
