"""Memory of the package's own formats."""

import pytest

from ridgeplan.roofline import memory
from ridgeplan.roofline.models import load_shape

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
