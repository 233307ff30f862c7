"""Recurrent states, sparse indexers and skewed routing: costs and memory counted by hand."""

from dataclasses import replace

import pytest

from ridgeplan.planner.lowering import strategy_of
from ridgeplan.planner.queries.gamma import best_gamma
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.engine import EngineReserve, engine_memory, page_tokens
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import full_kv, index_memory, state_memory
from ridgeplan.roofline.passes import PassTerms, decode_pass, prefill_pass
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
from ridgeplan.roofline.round import draft_terms, target_terms

QWEN = load_shape("Qwen/Qwen3.5-27B")
STATE = 48 * 128 * 128 * 4  # value heads x key width x value width, in fp32
CHANNELS = (16 + 16 + 48) * 128
INPUTS = (CHANNELS + 2 * 48) * 2  # queries, keys and values, step sizes and decays, in bf16
OUTPUTS = 48 * 128 * 2
CONSTANTS = CHANNELS * 4 * 2 + 2 * 48 * 4  # taps, and step biases and decay rates in fp32


def update(terms: PassTerms) -> ops.Cost:
    (op,) = (op for op in decode_pass(QWEN, terms) if op.name == "state update")
    assert op.launches == 48
    return op.cost


def test_a_plain_step_reads_and_writes_each_state_once():
    """It goes through the last token again, and the convolution sees 3 tokens ahead of that one."""
    cost = update(PassTerms.plain(3, 1000, 2))
    assert cost.read_bytes == 3 * (STATE + (1 + 1 + 3) * INPUTS) + CONSTANTS
    assert cost.write_bytes == 3 * (STATE + INPUTS + OUTPUTS)
    assert cost.flops == 3 * 2 * (7 * 48 * 128 * 128 + 2 * CHANNELS * 4)


@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_a_round_writes_the_states_once_however_many_tokens_it_drafts(gamma, h200_profile):
    plan = preset("quantspec", Workload(QWEN.name, "h200", 32768))
    plan = replace(plan, speculation=replace(plan.speculation, gamma=gamma))
    machine = Machine.of(h200_profile)
    strategy = strategy_of(plan, QWEN, machine, 0.9)
    draft = update(draft_terms(QWEN, machine, strategy, 32768))
    target = update(target_terms(QWEN, machine, strategy, 32768))
    queries = gamma + 1
    assert draft.read_bytes == STATE + (1 + (gamma - 1) / 2 + 3) * INPUTS + CONSTANTS
    assert draft.write_bytes == INPUTS + OUTPUTS
    assert target.read_bytes == STATE + (2 * queries + 3) * INPUTS + CONSTANTS
    assert target.write_bytes == STATE + queries * (INPUTS + OUTPUTS)


def test_states_take_memory_that_does_not_grow_with_the_context():
    assert state_memory(QWEN, 2, 1, 2) == 2 * 48 * (STATE + 5 * INPUTS)
    assert state_memory(QWEN, 1, 4, 2) == 48 * (STATE + 11 * INPUTS)
    assert full_kv(QWEN, 1, 1000, 2) == 16 * 1000 * 2 * 4 * 256 * 2  # in 16 of 64 layers: 64 KiB a token


def test_an_engine_keeps_each_state_in_a_page_of_the_cache(h200_profile):
    """A layer caches 4 KiB a token; a state of 3 MiB and its convolution need pages of 784 tokens."""
    tokens = page_tokens(QWEN, 16)
    assert tokens == 784 and tokens * 4096 >= STATE + CHANNELS * 3 * 2 > (tokens - 16) * 4096
    memory = engine_memory(QWEN, EngineReserve(batched_tokens=1, other_bytes=0), 1, 1000, 16, 16)
    assert memory.buffers == 48 * 784 * 4096
    assert memory.kv == 16 * 2 * 784 * 4096


def test_prefill_in_chunks_of_64_tokens():
    (op,) = (op for op in prefill_pass(QWEN, 1, 6400, 2) if op.name == "state chunks")
    per_token = 3 * 128 * 128 + 64 * (2 * 128 + 128) + 64 * (128 + 128 + 64 / 3)
    assert op.cost.flops == pytest.approx(2 * 6400 * 48 * per_token)
    assert op.cost.read_bytes == 6400 * INPUTS + 100 * STATE


def test_a_sparse_indexer_scans_all_keys_and_attention_reads_what_it_chose():
    shape = load_shape("DeepSeek-V3.2")
    terms = PassTerms.plain(1, 65536, 2)
    step = {op.name: op for op in decode_pass(shape, terms)}
    key_bytes = 128 + 4  # fp8, and a scale
    assert step["indexer"].cost.read_bytes == 65536 * key_bytes
    assert step["indexer"].cost.flops == 2 * 64 * 128 * 65536
    assert step["attention"].depth == 2048
    assert index_memory(shape, 1, 65536) == 61 * 65536 * key_bytes


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5])
def test_skewed_loads_hit_fewer_experts(skew):
    shares = ops.zipf_shares(128, 8, skew)
    assert sum(share * count for share, count in shares) == pytest.approx(8, rel=1e-6)
    assert sum(count for _, count in shares) == 128 and max(share for share, _ in shares) <= 1
    activated = [float(ops.activated_experts(128, 8, rows, skew)) for rows in (1, 2, 8, 64)]
    uniform = [ops.activated_experts(128, 8, rows) for rows in (1, 2, 8, 64)]
    assert activated[0] == pytest.approx(8) and activated == sorted(activated)
    assert all(skewed < even for skewed, even in zip(activated[1:], uniform[1:], strict=True))


def test_drafts_of_experts_are_fewer_than_those_of_a_dense_model_of_the_same_active_size():
    experts = load_shape("Qwen3-30B-A3B")
    dense = replace(
        experts, name="dense", architecture="qwen3", intermediate=8 * 768, experts=0, experts_per_token=0,
        expert_intermediate=0,
    )  # fmt: skip
    shapes = experts, replace(experts, routing_skew=1.5), dense
    cells = [best_gamma(shape, "h200", contexts=(32768,), batches=(1,), backend="any")[0] for shape in shapes]
    uniform, skewed, without = cells
    assert uniform.gamma <= skewed.gamma <= without.gamma
    assert uniform.gamma < without.gamma
    assert uniform.speedup < skewed.speedup < without.speedup
