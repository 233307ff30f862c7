"""Memory of the package's own formats."""

import numpy as np
import pytest
import sympy

from ridgeplan.roofline import memory
from ridgeplan.roofline.catalog.models import load_shape

GB = 1e9


def test_kv_of_llama_3_1_8b_at_32k_is_4_gib():
    shape = load_shape("Llama-3.1-8B")
    assert memory.full_kv(shape, 1, 32768, 2) == 4 * 2**30  # SpeContext, section 2.2: 4 GB


def test_weights_of_llama_3_1_8b():
    shape = load_shape("Llama-3.1-8B")
    assert memory.weight_memory(shape, 2, 2) == 2 * shape.parameters
    # 4-bit matrices; embedding, head and norms stay in 16 bits
    assert memory.weight_memory(shape, 0.53125, 2) == pytest.approx(5.81 * GB, rel=0.01)


def test_int8_codes_take_little_more_than_half_of_bf16_and_the_lower_plane_half_of_them():
    shape = load_shape("Llama-3.1-8B")
    full = memory.full_kv(shape, 1, 65536, 2)
    upper, both = (memory.code_memory(shape, 1, 65536, planes, 128) for planes in (1, 2))
    assert upper / full == pytest.approx(0.53125 / 2)
    assert both / full == pytest.approx(1.03125 / 2)
    assert memory.code_memory(shape, 1, 65536, 0, 128) == 0


def test_window_layers_keep_the_whole_context_as_the_runtime_does():
    shape = load_shape("openai/gpt-oss-20b")
    assert memory.full_kv(shape, 1, 10000, 2) == 24 * 10000 * 2 * 8 * 64 * 2
    assert memory.code_memory(shape, 1, 10000, 2, 128) == 24 * 10000 * 8 * (2 * 64 + 64 * 4 / 128 + 4)


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
def test_buffers_are_lent_whole_and_in_turn(arena_bytes, taken_bytes):
    assert memory.bytes_in_arena(arena_bytes, (100, 200, 90, 90)) == taken_bytes


def test_lent_bytes_of_arrays_and_symbols_are_those_of_numbers():
    held, tokens = np.arange(0, 700, 7), np.arange(1, 101)
    widths = (4, 4, 1, 1)
    expected = [memory.bytes_in_arena(h, [t * w for w in widths]) for h, t in zip(held, tokens, strict=True)]
    np.testing.assert_array_equal(memory.bytes_in_arena(held, [tokens * w for w in widths]), expected)
    h, t = sympy.symbols("h t", positive=True)
    function = sympy.lambdify([h, t], memory.bytes_in_arena(h, [t * w for w in widths]), modules="numpy", cse=True)
    np.testing.assert_array_equal(function(held.astype(float), tokens.astype(float)), expected)


def test_what_is_lent_is_not_allocated():
    shape = load_shape("Llama-3.1-8B")
    buffers = memory.prompt_buffers(shape, 131072, 2)
    assert buffers == (2**30, 2**30, 2**28, 2**28)
    alone = memory.prefill_workspace(shape, 131072, 2)
    chunk = 4096 * 3 * (4096 + 14336) * 2
    assert alone == sum(buffers) + chunk
    assert memory.prefill_workspace(shape, 131072, 2, 4 * 10**9) == chunk
    assert memory.prefill_workspace(shape, 131072, 2, 2**30 + 2**28) == chunk + 2**30 + 2**28


def test_memory_of_a_prompt_that_borrows_grows_with_it():
    shape, tokens = load_shape("Llama-3.1-8B"), np.arange(1, 400_000, 37)
    for arena_bytes in (0, 10**8, 4 * 10**9):
        assert (np.diff(memory.prefill_workspace(shape, tokens, 2, arena_bytes)) >= 0).all()
