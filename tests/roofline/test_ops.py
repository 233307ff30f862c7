"""Costs of operations, against counts made by hand."""

import pytest

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline import ops
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.passes import PassTerms, decode_pass, prefill_pass, weight_bytes


def terms(**changes):
    plain = {
        "batch": 1,
        "queries": 1,
        "quantized_tokens": 0,
        "full_tokens": 1024,
        "bits": 0,
        "group": 128,
        "splits": 1,
        "weight_bytes": 2,
        "head_bytes": 2,
        "element_bytes": 2,
    }
    return PassTerms(**{**plain, **changes})


QUERY = 32 * 128 * 2  # one query of 32 heads of 128 elements in bf16
MERGED = 32 * (128 + 1) * 4  # its partial output and log-sum-exp of one split, fp32: written, then read by the merge


def by_name(passes):
    return {op.name: op for op in passes}


def total(passes):
    return sum((op.total for op in passes), ops.Cost())


def test_costs_add_up_and_repeat():
    first, other = ops.Cost(1, 20, 300), ops.Cost(4000, 50_000, 600_000)
    assert first + other == ops.Cost(4001, 50_020, 600_300)
    assert 3 * first == first * 3 == ops.Cost(3, 60, 900)
    assert (first.bytes, first.intensity) == (320, 1 / 320)


def test_linear_counts_multiply_adds_weights_and_activations():
    cost = ops.linear(rows=3, inputs=4, outputs=5, weight_bytes=2, element_bytes=2)
    assert (cost.flops, cost.read_bytes, cost.write_bytes) == (
        2 * 3 * 4 * 5,
        4 * 5 * 2 + 3 * 4 * 2,
        3 * 5 * 2,
    )


def test_gate_and_up_are_one_product_that_may_apply_swiglu_itself():
    """3 rows through two weights of 4 x 5; SwiGLU by itself reads both products and writes one."""
    fused, apart = (ops.gated_linear(3, 4, 5, weight_bytes=2, element_bytes=2, fused=flag) for flag in (1, 0))
    assert fused.flops == apart.flops == 2 * 3 * 4 * 10
    assert fused.read_bytes == apart.read_bytes == 2 * 4 * 5 * 2 + 3 * 4 * 2
    assert (fused.write_bytes, apart.write_bytes) == (3 * 5 * 2, 3 * 10 * 2)
    swiglu = ops.swiglu(3, 5, 2)
    assert (swiglu.read_bytes, swiglu.write_bytes) == (3 * 10 * 2, 3 * 5 * 2)


@pytest.mark.parametrize("planes", [1, 2])
def test_quantized_tokens_take_what_their_tensors_take(planes):
    """3 groups of 32 tokens, 2 sequences, 5 KV heads of 64: written by a quantization, read by attention."""
    stored = QuantizedKV.allocate(2, 5, 3, 32, 64, "cpu", lower=planes == 2).bytes
    assert ops.quantized_bytes(2, 5, 64, 96, 4 * planes, 32) == stored
    quantized = ops.quantize(2, 5, 64, 96, 2, 32, planes)
    assert (quantized.read_bytes, quantized.write_bytes) == (2 * 2 * 5 * 96 * 64 * 2, stored)
    attended, nothing = (
        ops.attention(2, 1, 5, 5, 64, ops.KVRead(tokens, 0, 4 * planes, 2, 32, 1)) for tokens in (96, 0)
    )
    assert attended.read_bytes - nothing.read_bytes == stored
    assert attended.flops - nothing.flops == 4 * 2 * 5 * 64 * 96


def test_a_draw_reads_the_logits_of_every_distribution():
    """Rejection sampling draws from the residual: the target's logits and the draft's."""
    assert ops.draw(3, 1000, 2).read_bytes == 3 * 1000 * 2
    assert ops.draw(3, 1000, 2, distributions=2).read_bytes == 2 * 3 * 1000 * 2
    assert ops.filter_logits(3, 1000, 2).read_bytes == 3 * 1000 * 2


@pytest.mark.parametrize(("bits", "saving"), [(4, 3.76), (8, 1.88)])
def test_quantized_weights_reach_the_byte_limit_of_their_format(bits, saving):
    # 4-bit codes with a 16-bit scale and minimum per 128 parameters: 2 / (0.5 + 4/128) = 3.76; 8 bits are twice that
    assert 2 / weight_bytes(bits, 128, 2) == pytest.approx(saving, abs=0.01)


@pytest.mark.parametrize(("bits", "bytes_per_element"), [(4, 0.53125), (8, 1.03125)])
def test_hierarchical_codes_with_scales_and_minima_at_head_dim_128(bits, bytes_per_element):
    tokens, heads = 65536, 8
    with_codes = ops.attention(1, 1, 32, heads, 128, ops.KVRead(tokens, 0, bits, 2, 128, 1))
    assert (with_codes.read_bytes - QUERY - MERGED) / (2 * tokens * heads * 128) == bytes_per_element


def test_gqa_reads_kv_once_per_group_but_computes_for_every_query_head():
    many, few = (ops.attention(1, 1, 32, heads, 128, ops.KVRead(0, 4096, 0, 2, 128, 1)) for heads in (32, 8))
    assert many.flops == few.flops
    assert (many.read_bytes - QUERY - MERGED) == 4 * (few.read_bytes - QUERY - MERGED)


def test_attention_holds_its_merge():
    """3 queries of 32 heads in 5 splits: fp32 partials go out and come back, and one bf16 output remains."""
    cost = ops.attention(1, 3, 32, 8, 128, ops.KVRead(0, 4096, 0, 2, 128, 5))
    partials = 3 * 5 * MERGED
    assert cost.read_bytes == 2 * 8 * 128 * 4096 * 2 + 3 * QUERY + partials
    assert cost.write_bytes == partials + 3 * QUERY
    assert cost.flops == 4 * 3 * 32 * 128 * 4096 + 2 * 3 * 32 * 5 * 128


def test_plain_decode_step_of_llama_3_1_8b_reads_what_the_facts_say():
    # facts: bytes / 4.3 TB/s is 7.49 ms at 128k and 3.52 ms at 1k
    shape = load_shape("Llama-3.1-8B")
    for context, milliseconds in ((131072, 7.49), (1024, 3.52)):
        read = total(decode_pass(shape, terms(full_tokens=context))).read_bytes
        assert read / 4.3e12 * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_decode_flops_are_two_per_active_parameter_plus_attention():
    shape = load_shape("Llama-3.1-8B")
    step = by_name(decode_pass(shape, terms(full_tokens=2048)))
    linear = sum(op.total.flops for op in step.values() if op.category == "linear")
    vectors = shape.vector_params + shape.hidden
    assert linear == 2 * (shape.active_parameters - vectors)
    assert step["attention"].total.flops == 32 * (4 * 4096 * 2048 + 2 * 4096)  # 32 layers, each with its merge


def test_mla_caches_one_latent_row_per_token():
    shape = load_shape("DeepSeek-V3")
    attention = by_name(decode_pass(shape, terms(full_tokens=4096)))["attention"]
    row = (512 + 64) * 2
    queries, partials = 128 * (512 + 64) * 2, 128 * (512 + 1) * 4
    assert attention.cost.read_bytes == 4096 * row + queries + partials
    assert attention.cost.write_bytes == partials + 128 * 512 * 2
    assert attention.cost.flops == 2 * 128 * (576 + 512) * 4096 + 2 * 128 * 512


def test_codes_of_a_latent_row_are_fewer_bytes_than_the_row():
    shape = load_shape("DeepSeek-V3")
    codes = by_name(decode_pass(shape, terms(quantized_tokens=4096, full_tokens=0, bits=8)))["attention"].cost
    full = by_name(decode_pass(shape, terms(full_tokens=4096)))["attention"].cost
    queries, partials = 128 * (512 + 64) * 2, 128 * (512 + 1) * 4
    # of a latent one byte an element, and a scale and a minimum for 128 tokens; the rotated key in 16 bits
    assert codes.read_bytes - queries - partials == 4096 * (512 + 512 * 4 / 128 + 64 * 2)
    assert codes.flops == full.flops


def test_prefill_reads_weights_in_the_bits_they_are_stored_in():
    shape = load_shape("Llama-2-7B")
    full, stored = (total(prefill_pass(shape, 1, 1, 2, *bits)) for bits in ((), (0.5,)))
    assert full.read_bytes - stored.read_bytes == 1.5 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert full.flops == stored.flops


def test_sliding_window_layers_read_at_most_their_window():
    shape = load_shape("openai/gpt-oss-20b")
    step = by_name(decode_pass(shape, terms(full_tokens=8192)))
    full, window = step["attention"], step["attention (window)"]
    assert full.launches == window.launches == 12
    merge_flops = 2 * 64 * 64
    assert full.cost.flops - merge_flops == 4 * 64 * 64 * 8192
    assert window.cost.flops - merge_flops == 4 * 64 * 64 * 128


def test_activated_experts_grow_with_the_batch_and_never_beyond_all():
    activated = [ops.activated_experts(128, 8, rows) for rows in (1, 2, 8, 64, 4096)]
    assert activated[0] == pytest.approx(8)
    assert activated == sorted(activated)
    assert activated[1] < 16  # two tokens share some experts
    assert activated[-1] == pytest.approx(128)


def test_a_moe_step_reads_the_activated_experts_only():
    shape = load_shape("Qwen/Qwen3-30B-A3B")
    single, many = (by_name(decode_pass(shape, terms(batch=batch)))["routed experts"].cost for batch in (1, 512))
    expert_bytes = 3 * 2048 * 768 * 2
    assert single.read_bytes == pytest.approx(8 * expert_bytes, rel=1e-3)
    assert many.read_bytes == pytest.approx(128 * expert_bytes, rel=0.01)
    assert many.flops == 512 * single.flops


def test_prefill_counts_half_of_all_query_key_pairs():
    shape = load_shape("Llama-2-7B")
    attention = by_name(prefill_pass(shape, 1, 4096, 2))["prefill attention"]
    assert attention.total.flops == 32 * 4 * 4096 * 4096**2 / 2


def test_windowed_prefill_equals_causal_when_the_window_covers_the_prompt():
    arguments = (2, ops.PromptHeads(32, 2048, 128, 128), 1000, 2)
    assert ops.causal_attention(*arguments, window=1000).flops == ops.causal_attention(*arguments).flops


def test_verification_costs_attention_no_more_bytes_than_one_query_but_for_queries_and_partials():
    single, eight = (
        ops.attention(1, queries, 32, 8, 128, ops.KVRead(131072, 200, 8, 2, 128, 33)) for queries in (1, 8)
    )
    assert eight.read_bytes - single.read_bytes == 7 * (QUERY + 33 * MERGED)
    assert eight.flops == 8 * single.flops


def test_ridge_point_is_peak_over_bandwidth():
    h200 = load_hardware("h200")
    assert h200.ridge_point == pytest.approx(989.5e12 / 4.8e12, rel=0.01)
