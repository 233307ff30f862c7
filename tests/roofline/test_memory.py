"""Memory of the package's own formats, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
import sympy

from ridgeplan.planner import Workload, preset, resolve
from ridgeplan.planner.lowering import strategy_of
from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Machine


def test_kv_of_llama_3_1_8b_at_32k_is_4_gib():
    shape = load_shape("Llama-3.1-8B")
    assert memory.full_kv(shape, 1, 32768, 2) == 4 * 2**30  # SpeContext, section 2.2: 4 GB


# Matrices of a layer: queries and output 4096 x 4096, keys and values 4096 x 1024, three of the MLP 4096 x 14336.
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
EMBEDDING = 128_256 * 4096


def test_weights_of_llama_3_1_8b():
    shape = load_shape("Llama-3.1-8B")
    others = 2 * EMBEDDING + 65 * 4096  # input table, head, norms
    assert memory.weight_memory(shape, 2, 2) == 2 * (MATRICES + others) == 16_060_522_496
    assert memory.weight_memory(shape, 0.53125, 2) == 0.53125 * MATRICES + 2 * others
    assert memory.draft_weight_memory(shape, 0.53125) == 0.53125 * (MATRICES + EMBEDDING)


def test_kv_of_llama_3_1_8b_takes_128_kib_a_token():
    shape = load_shape("Llama-3.1-8B")
    token_bytes = 32 * 2 * 8 * 128 * 2
    assert token_bytes == 131_072
    assert memory.full_kv(shape, 3, 1000, 2) == 3 * 1000 * token_bytes


def test_int8_codes_take_little_more_than_half_of_bf16_and_the_lower_plane_half_of_them():
    shape = load_shape("Llama-3.1-8B")
    full = memory.full_kv(shape, 1, 65536, 2)
    upper, both = (memory.code_memory(shape, 1, 65536, planes, 128) for planes in (1, 2))
    assert upper / full == pytest.approx(0.53125 / 2)
    assert both / full == pytest.approx(1.03125 / 2)
    assert memory.code_memory(shape, 1, 65536, 0, 128) == 0


def test_layers_whose_window_hides_tokens_hold_neither_all_of_them_nor_codes():
    shape, codes = load_shape("mistralai/Mistral-7B-v0.1"), 32 * 4000 * 8 * (2 * 128 + 128 * 4 / 128 + 4)
    assert memory.full_kv(shape, 1, 4000, 2, 4096) == 32 * 4000 * 2 * 8 * 128 * 2
    assert memory.code_memory(shape, 1, 4000, 2, 128, 4096) == codes
    assert memory.full_kv(shape, 1, 4000, 2, 4097) == memory.code_memory(shape, 1, 4000, 2, 128, 4097) == 0


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "mistralai/Mistral-7B-v0.1"]
)
def test_int8_codes_take_less_than_bf16_in_every_kind_of_model(name):
    shape = load_shape(name)
    assert memory.code_memory(shape, 1, 65536, 2, 128) < 0.55 * memory.full_kv(shape, 1, 65536, 2)


@pytest.mark.parametrize(
    "arena_bytes, taken_bytes",
    [
        (0, 0),
        (99, 90),  # neither hidden states nor queries, but keys, and values no longer
        (100, 100),
        (179, 100),
        (189, 100),
        (190, 190),
        (299, 280),
        (300, 300),
        (389, 300),
        (390, 390),
        (480, 480),
        (10_000, 480),
    ],
)
def test_an_arena_takes_buffers_whole_and_in_turn(arena_bytes, taken_bytes):
    assert memory.arena_bytes(arena_bytes, (100, 200, 90, 90)) == taken_bytes


def test_an_arena_of_arrays_and_symbols_takes_what_one_of_numbers_does():
    held, tokens = np.arange(0, 700, 7), np.arange(1, 101)
    widths = (4, 4, 1, 1)
    expected = [memory.arena_bytes(h, [t * w for w in widths]) for h, t in zip(held, tokens, strict=True)]
    np.testing.assert_array_equal(memory.arena_bytes(held, [tokens * w for w in widths]), expected)
    h, t = sympy.symbols("h t", positive=True)
    function = sympy.lambdify([h, t], memory.arena_bytes(h, [t * w for w in widths]), modules="numpy", cse=True)
    np.testing.assert_array_equal(function(held.astype(float), tokens.astype(float)), expected)


def test_buffers_in_the_arena_are_not_allocated():
    shape = load_shape("Llama-3.1-8B")
    buffers = memory.prompt_buffers(shape, 131072, 2)
    assert buffers == (2**30, 2**30, 2**28, 2**28)
    workspace = memory.prefill_workspace(shape, 131072, 2)
    chunk = 4096 * (2 * 4096 + 3 * 14336) * 2
    assert workspace == sum(buffers) + chunk
    assert memory.prefill_workspace(shape, 131072, 2, 4 * 10**9) == chunk
    assert memory.prefill_workspace(shape, 131072, 2, 2**30 + 2**28) == chunk + 2**30 + 2**28


def test_a_prompts_workspace_grows_with_it_whatever_the_arena():
    shape, tokens = load_shape("Llama-3.1-8B"), np.arange(1, 400_000, 37)
    for arena_bytes in (0, 10**8, 4 * 10**9):
        assert (np.diff(memory.prefill_workspace(shape, tokens, 2, arena_bytes)) >= 0).all()


def small_shape(**changes):
    sizes = {"hidden": 64, "q_heads": 8, "kv_heads": 2, "head_dim": 32, "intermediate": 16, "vocab": 1000}
    return replace(load_shape("Llama-3.1-8B"), layers=3, **{**sizes, **changes})


@pytest.mark.parametrize(
    "tokens, intermediate, workspace",
    [
        (100, 16, 100 * (64 + 2 * 256 + 128)),  # QKV: normed rows, queries before and after RoPE, keys and values
        (100, 1000, 100 * (2 * 64 + 3 * 1000)),  # MLP: gate, up, what they become; residual and normed rows
        (5000, 1000, 4096 * (2 * 64 + 3 * 1000)),  # of one chunk
        (40_192, 16, 65_536 * 128),  # the attention output of 65,536 tokens of a KV head's 4 query heads
        (100_096, 16, 100_096 * 128),  # of one KV head at least
    ],
    ids=["projections", "MLP", "one chunk", "attention", "one head"],
)
def test_prefill_holds_the_prompts_buffers_and_the_largest_of_its_steps(tokens, intermediate, workspace):
    """Hidden states of 64, queries of 256, keys and values of 64 elements a token last through the prompt."""
    shape = small_shape(intermediate=intermediate)
    assert memory.prefill_workspace(shape, tokens, 2) == 2 * (tokens * (64 + 256 + 64 + 64) + workspace)
    assert memory.prompt_buffers(shape, tokens, 2) == tuple(2 * tokens * width for width in (64, 256, 64, 64))


def test_a_long_prompt_attends_at_its_padded_length():
    """9000 tokens as 9216, 50,000 as 50,176, of which one KV head attends at once; widths as above."""
    buffers = 2 * (9000 * 64 + 9216 * (256 + 64 + 64))
    assert sum(memory.prompt_buffers(small_shape(), 9000, 2)) == buffers
    assert memory.prefill_workspace(small_shape(), 9000, 2) == buffers + 2 * 4096 * (64 + 2 * 256 + 128)
    assert memory.prefill_workspace(small_shape(), 50_000, 2) == 2 * (50_000 * 64 + 50_176 * 384 + 65_536 * 128)


@pytest.mark.parametrize("intermediate, widest", [(16, 64), (1000, 1000)])
def test_a_round_holds_logits_partials_and_activations(intermediate, widest):
    """2 sequences of 3 queries in 4 splits: logits five times over, fp32 partials of 8 heads, four activations."""
    rows = 2 * 3
    expected = 5 * rows * 1000 * 2 + rows * 8 * 4 * (32 + 1) * 4 + 4 * rows * widest * 2
    assert memory.decode_workspace(small_shape(intermediate=intermediate), 2, 3, 4, 2) == expected


def test_the_peak_is_what_stays_and_the_larger_workspace():
    held = {"weights": 1, "draft_weights": 20, "kv": 300, "buffers": 3000, "libraries": 1000}
    prefill = memory.MemoryBreakdown(**held, prefill_workspace=70_000, decode_workspace=60_000)
    decode = memory.MemoryBreakdown(**held, prefill_workspace=50_000, decode_workspace=60_000)
    assert prefill.resident == decode.resident == 4321
    assert (prefill.prefill_peak, prefill.decode_peak, prefill.peak) == (74_321, 64_321, 74_321)
    assert decode.peak == 64_321
    assert prefill.reserved_peak == 134_321  # a captured round keeps its own while prompts are processed


def test_layers_that_hold_a_window_alone_are_neither_quantized_nor_flushed():
    """Gemma-3-1B: 4 of its 26 layers read all tokens; the others hold 512."""
    shape = load_shape("gemma-3-1b-it")
    plan = preset("int8", Workload("gemma-3-1b-it", "h200", 8192))
    strategy = strategy_of(plan, shape, Machine.of(resolve(shape, "h200")[1]), 1.0)
    assert memory.coded_layers(shape, strategy) == 4 < shape.kv_layers
    assert memory.coded_layers(shape, strategy.with_terms(context=100, new_tokens=100)) == shape.kv_layers
