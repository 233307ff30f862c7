"""Weights in GGUF's quantized types: their values, their products, and rows of tables."""

import gguf
import pytest
import torch
from gguf_blocks import BLOCKS, random_blocks
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear import gguf_rows, linear_gguf
from ridgeplan.kernels.linear.gguf import GgufWeight, gguf_weight, stacked
from ridgeplan.roofline.catalog.gguf import gguf_bits
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS

KINDS = {kind: gguf.GGMLQuantizationType(kind).name for kind in BLOCK_FORMATS}


def weight_of(kind: int, outputs: int, inputs: int, device: str = "cpu") -> tuple[GgufWeight, Tensor]:
    """A random weight, and its values [outputs, inputs] in float32."""
    content, values = random_blocks(KINDS[kind], outputs, inputs)
    weight = gguf_weight(kind, torch.from_numpy(content))
    return weight.with_parts(lambda part: part.to(device)), values.to(device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def test_every_type_has_random_blocks() -> None:
    assert set(KINDS.values()) <= set(BLOCKS)


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_values_are_those_of_the_file(kind: int, device: str) -> None:
    weight, values = weight_of(kind, 24, 512, device)
    content, _ = random_blocks(KINDS[kind], 24, 512)
    of_package = torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType(kind))).to(device)
    assert torch.equal(weight.dequantize(), of_package)
    assert relative_error(weight.dequantize(), values.double()) < 1e-7


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_memory_is_as_priced_and_about_that_of_the_file(kind: int) -> None:
    weight, values = weight_of(kind, 24, 512)
    bits = 8 * weight.bytes / values.numel()
    assert bits == BLOCK_FORMATS[kind].held_bits
    six_bit_scales = KINDS[kind] in ("Q4_K", "Q5_K")  # which take 8 bits, of two for 32 weights
    assert bits - gguf_bits(kind) == (2 * 2 / 32 if six_bit_scales else 0)


PRODUCTS = [(24, 512, (), True), (24, 512, (5,), False), (70, 256, (2, 9), True), (40, 768, (67,), True)]


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("outputs", "inputs", "shape", "biased"), PRODUCTS)
@pytest.mark.usefixtures("poisoned_empty")
def test_product_equals_the_dense_one(
    outputs: int, inputs: int, shape: tuple[int, ...], biased: bool, backend: str, kind: int, device: str
) -> None:
    weight, values = weight_of(kind, outputs, inputs, device)
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-9, 9, outputs, device=device) if biased else None
    expected = functional.linear(x.double(), values.double(), None if bias is None else bias.double())
    actual = linear_gguf(x, weight, bias, backend=backend)
    assert actual.shape == (*shape, outputs)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("inputs", [32, 96, 640, 896])
@pytest.mark.parametrize("kind", [2, 8], ids=KINDS.get)
def test_inputs_need_not_be_whole_tiles(inputs: int, kind: int, device: str) -> None:
    weight, values = weight_of(kind, 24, inputs, device)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1)).to(device)
    expected = x.double() @ values.double().T
    assert relative_error(linear_gguf(x, weight, backend="triton"), expected) < 1e-5


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_products_in_bfloat16_round_the_weight_as_a_dense_one_is(rows: int, backend: str, device: str) -> None:
    weight, values = weight_of(12, 40, 512, device)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    actual = linear_gguf(x, weight, backend=backend)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, x.double() @ values.double().T) < 8e-3


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_gated_product_applies_swiglu(backend: str, device: str) -> None:
    weight, values = weight_of(14, 64, 256, device)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(device)
    expected = swiglu(x.double() @ values.double().T, backend="reference")
    assert relative_error(linear_gguf(x, weight, gated=True, backend=backend), expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_of_a_table_are_the_chosen_ones(kind: int, backend: str, device: str) -> None:
    weight, values = weight_of(kind, 50, 256, device)
    ids = torch.tensor([49, 0, 7, 7, *range(20)], device=device)
    out = torch.empty(len(ids), 256, device=device)
    assert torch.equal(gguf_rows(weight, ids, out, backend=backend), weight.dequantize()[ids])
    assert relative_error(out, values[ids].double()) < 1e-7


def test_neighbours_of_one_type_are_stacked() -> None:
    (q, q_values), (k, k_values), (v, v_values) = weight_of(12, 32, 256), weight_of(12, 16, 256), weight_of(14, 16, 256)
    queries_and_keys, values = stacked([q, k, v])
    assert torch.allclose(queries_and_keys.dequantize(), torch.cat([q_values, k_values]))
    assert queries_and_keys.shape == (48, 256)
    assert values is v and torch.allclose(values.dequantize(), v_values)


def test_an_input_of_another_width_is_refused() -> None:
    weight, _ = weight_of(12, 16, 256)
    with pytest.raises(ValueError, match=r"x \[2, 64\] does not fit a weight of 256 inputs"):
        linear_gguf(torch.zeros(2, 64), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_products_of_a_layer_on_a_gpu(kind: int) -> None:
    """Against the dense bfloat16 product, of a weight as large as a layer of an 8B model has."""
    weight, values = weight_of(kind, 6144, 4096, "cuda")
    dense = values.bfloat16().float()
    for rows in (1, 5, 16, 17, 64, 65, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        expected = functional.linear(x.float(), dense).double()
        assert relative_error(linear_gguf(x, weight), expected) < 4e-3, rows  # the rounding of the output
