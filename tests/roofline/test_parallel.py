"""Several GPUs: what one of them holds, its messages, and the time of a step."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ridgeplan.planner.engines.rates import engine_profile
from ridgeplan.roofline.catalog.hardware import list_hardware, load_hardware
from ridgeplan.roofline.catalog.links import Link, link_of, list_links
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.parallel import SINGLE, Parallel
from ridgeplan.roofline.catalog.sharding import shard, uneven
from ridgeplan.roofline.catalog.validation import InvalidField
from ridgeplan.roofline.collectives import Network, all_reduce_seconds, pass_messages
from ridgeplan.roofline.engine import EngineStep, engine_memory
from ridgeplan.roofline.ops import busiest_rank

LLAMA, QWEN, DEEPSEEK = map(load_shape, ("Llama-3.1-70B", "Qwen3-235B-A22B", "DeepSeek-V3"))
H200 = load_hardware("h200")
RATES = engine_profile("vllm", H200).rates
NVLINK = link_of(H200)


def step_s(shape, parallel, batch=16, context=4096):
    step = EngineStep(-(-batch // parallel.data), context, 16, 16, RATES.kv_rate("bf16"))
    return float(RATES.step_s(shard(shape, parallel), H200, step))


@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    "parallel", [Parallel(2), Parallel(4, 2), Parallel(2, 1, 2), Parallel(4, 1, 2, expert=True)], ids=str
)
def test_shards_together_hold_the_matrices_and_the_cache_once(shape, parallel):
    """Attention is on every data-parallel rank; all that is counted is even here."""
    part = shard(shape, parallel)
    assert part.expert_params * parallel.gpus == shape.expert_params
    assert part.mixer_params * parallel.gpus == shape.mixer_params * parallel.data
    assert part.dense_params * parallel.gpus == shape.dense_params * parallel.data
    cached, of_all = (sum(layers * each.cached_elements for each, layers in held.attentions) for held in (part, shape))
    assert cached * parallel.tensor * parallel.pipeline == of_all
    assert (part.blocks * parallel.pipeline, shard(shape, SINGLE)) == (shape.blocks, shape)


def test_heads_and_vocabularies_that_do_not_divide_are_those_of_the_gpu_with_most():
    """28 query heads of 4 KV heads and 152064 tokens by 8: 4 heads, one KV head on two GPUs each, 64 x 2376 / 8."""
    shape = load_shape("Qwen2.5-7B")
    part = shard(shape, Parallel(8))
    assert (shape.q_heads, part.q_heads, part.kv_heads, part.vocab) == (28, 4, 1, 152_064 // 8)
    assert uneven(shape, Parallel(8)) == "28 query heads" and uneven(shape, Parallel(4)) is None
    assert shard(shape, Parallel(1, 3)).layers == 10  # of 28


def test_blocks_of_fp8_weights_are_not_cut():
    """vLLM refuses shards that are no multiple of 128: 18432 / 32 = 576, 2048 / 32 = 64; of 16: 1152 and 128."""
    assert uneven(DEEPSEEK, Parallel(32)) == uneven(DEEPSEEK, Parallel(8, 1, 4)) == "MLPs in fp8 blocks of 128"
    assert uneven(DEEPSEEK, Parallel(16)) is uneven(DEEPSEEK, Parallel(8, 1, 4, expert=True)) is None
    unscaled = replace(DEEPSEEK, weight_bits=replace(DEEPSEEK.weight_bits, attention=8, mlp=8, experts=8))
    assert uneven(unscaled, Parallel(32)) is None


def test_a_latent_row_is_on_every_gpu_and_its_factors_are_divided():
    """DeepSeek's q_a and kv_a projections are replicated: 7168 x (1536 + 576)."""
    whole, part = DEEPSEEK.attentions[0][0], shard(DEEPSEEK, Parallel(8)).attentions[0][0]
    assert (part.cached_elements, part.q_heads) == (whole.cached_elements, 16)
    replicated = 7168 * (1536 + 576)
    assert part.input_params(7168) - replicated == (whole.input_params(7168) - replicated) / 8


def test_the_busiest_of_several_ranks():
    """8 experts thrown at 8 ranks: 2.57 on the fullest by enumeration of the multinomial; none exceed the limit."""
    assert busiest_rank(1.0, 8) == pytest.approx(2.57, rel=0.07)
    assert busiest_rank(32.0, 8, 32) == 32 and busiest_rank(0.1, 8) == pytest.approx(0.8 * 0.69, rel=0.1)


# Microseconds of all-reduces of vLLM 0.24 on H200 in CUDA graphs, by bytes (aiconfigurator 0.12.0, links.toml).
MEASURED = {
    2: {256: 4.4, 65_536: 4.8, 1_048_576: 8.4, 8_388_608: 43.0, 134_217_728: 463.0},
    4: {256: 4.4, 65_536: 5.4, 1_048_576: 12.1, 8_388_608: 51.8, 134_217_728: 609.0},
    8: {256: 4.7, 65_536: 6.6, 1_048_576: 14.1, 8_388_608: 48.4, 134_217_728: 562.4},
}


def test_all_reduces_take_what_was_measured():
    """All within 45%, half of them within 10%: middle sizes of 8 GPUs change their algorithm later than at the best."""
    errors = sorted(
        abs(1e6 * all_reduce_seconds(NVLINK, size, ranks) / us - 1)
        for ranks, row in MEASURED.items()
        for size, us in row.items()
    )
    assert errors[-1] < 0.45 and errors[len(errors) // 2] < 0.1


# Milliseconds of a layer's experts of Qwen3-235B-A22B by vLLM 0.24 on H200, by bits, degrees and tokens (aiconfigurator
# 0.12.0, h200_sxm/moe/vllm/0.24.0: balanced, bf16 and fp8 by block).
MEASURED_EXPERTS = {
    (16, SINGLE): {1024: 1.377, 4096: 2.348, 16384: 9.027},
    (16, Parallel(8)): {512: 0.215, 1024: 0.283, 4096: 0.571, 16384: 2.063},
    (16, Parallel(8, expert=True)): {1024: 0.307, 4096: 0.644, 16384: 2.359},
    (8, SINGLE): {1024: 0.828, 4096: 2.359, 16384: 8.796},
    (8, Parallel(4)): {1024: 0.299, 4096: 0.907, 16384: 3.347},
    (8, Parallel(8, expert=True)): {4096: 0.357, 16384: 1.356},
}


def test_experts_take_what_was_measured():
    errors = []
    for (bits, parallel), measured in MEASURED_EXPERTS.items():
        for tokens, milliseconds in measured.items():
            step = EngineStep(tokens, 1, bits, 16, RATES.kv_rate("bf16"))
            timed = RATES.stage_timed(shard(QWEN, parallel), H200, step)
            ((op, seconds),) = [each for each in timed if each[0].kind == "grouped_linear"]
            errors.append(abs(1e3 * float(seconds) / op.launches / milliseconds - 1))
    assert float(np.median(errors)) < 0.1 and max(errors) < 0.35, errors


def test_messages_grow_with_size_and_ranks_and_cost_more_between_nodes():
    network, sizes = Network.of(H200), (1, 10**4, 10**6, 10**8)
    for kind, ranks in product(("all_reduce", "all_gather", "reduce_scatter"), (2, 4, 8, 16)):
        times = [network.seconds(kind, size, ranks) for size in sizes]
        assert times == sorted(times) and times[0] > 0
    assert network.seconds("all_reduce", 10**6, 16) > 2 * network.seconds("all_reduce", 10**6, 8)
    assert network.seconds("all_gather", 10**6, 2, stride=8) > 2 * network.seconds("all_gather", 10**6, 2)
    assert network.seconds("send", 10**6, 2, stride=8) > network.seconds("send", 10**6, 2)


def test_every_gpu_has_a_link_and_every_figure_a_source():
    assert {link_of(gpu).name for gpu in list_hardware()} <= {link.name for link in list_links()}
    assert link_of(load_hardware("rtx4090")).bandwidth_bytes_per_s == 32e9
    with pytest.raises(InvalidField, match="sources must say where these come from: bandwidth_bytes_per_s"):
        Link(name="x", title="x", bandwidth_bytes_per_s=1e9, latency_s=0.0, hop_s=0.0, utilization=1.0, gpus_per_node=2)


def test_messages_of_a_pass_by_hand():
    """2 tokens of Llama-3.1-70B by 4 GPUs: 161 all-reduces of 2 x 8192 bf16 numbers, and logits of 128256."""
    reduce, logits = pass_messages(shard(LLAMA, Parallel(4)), 2, 2, 2)
    assert (reduce.launches, reduce.cost.write_bytes, reduce.width) == (161, 2 * 8192 * 2, 4)
    assert logits.cost.write_bytes == 2 * 128_256 * 2
    assert [op.name for op in pass_messages(shard(QWEN, Parallel(1, 2, 2)), 2, 2, 2)] == [
        "gather tokens", "scatter outputs", "pipeline hop",
    ]  # fmt: skip


def test_tensor_parallelism_divides_a_step_and_a_pipeline_only_its_memory():
    """At batch 1 three of four stages wait; with as many sequences as stages all work, on fewer rows each."""
    one, tensor, pipeline = (step_s(LLAMA, parallel, 1) for parallel in (SINGLE, Parallel(4), Parallel(1, 4)))
    assert one / 4 < tensor < one / 2.5
    assert one < pipeline < 1.02 * one
    full = step_s(LLAMA, Parallel(1, 4), 64)
    assert full > step_s(LLAMA, SINGLE, 16)  # four micro-batches of 16 in turn
    part, whole = (
        engine_memory(shape, RATES.reserve, 8, 4096, 16, 16) for shape in (shard(LLAMA, Parallel(1, 4)), LLAMA)
    )
    assert whole.kv == pytest.approx(4 * part.kv)
    assert whole.weights / 4 < part.weights < whole.weights / 4 + 2 * LLAMA.embedding_params


def test_whole_experts_cost_more_at_batch_1_and_less_of_each_expert_at_none():
    """One token activates 8 experts, of which the busiest of 8 GPUs has about 2.4; slices divide them evenly."""
    assert step_s(QWEN, Parallel(8, expert=True), 1) > 1.03 * step_s(QWEN, Parallel(8), 1)
    assert step_s(QWEN, Parallel(8, expert=True), 256) < 1.05 * step_s(QWEN, Parallel(8), 256)


def test_a_gather_across_nodes_moves_each_rank_s_share_between_them():
    """Two nodes of 8 GPUs: over the link between nodes every GPU moves an eighth, whose half is its own."""
    network, size = Network.of(H200), 1e9
    link, between = network.link, network.between
    inside = link.latency_s + 7 * (link.hop_s + size / 8 / link.bytes_per_s)
    across = between.latency_s + between.hop_s + size / 8 / 2 / between.bytes_per_s
    assert network.seconds("all_gather", size, 16) == pytest.approx(inside + across)
    assert network.seconds("reduce_scatter", size, 16) == pytest.approx(inside + across)
