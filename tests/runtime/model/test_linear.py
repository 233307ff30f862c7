"""Linear layers: thin products on CPUs, and 4-bit weights against their definition."""

import pytest
import torch

from ridgeplan.kernels.linear.weights import Int4Weight
from ridgeplan.runtime.model.linear import PLANE_ROWS, Dense, Int4, LibraryInt4Weight, LibraryInt8Weight
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.calibration import quantized_linear
from ridgeplan.runtime.quantization.gptq import quantize_weight


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 64), (1, 5, 64), (3, 4, 64), (65, 64), (200, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_dense_equals_linear(shape, biased):
    weight, bias, x = random(48, 64), random(48, seed=1) if biased else None, random(*shape, seed=2)
    actual = Dense(weight, bias)(x)
    assert actual.shape == (*shape[:-1], 48)
    assert torch.allclose(actual, torch.nn.functional.linear(x, weight, bias), atol=1e-4)


@pytest.mark.parametrize(
    "outputs, inputs, group",
    [
        (48, 64, 32),
        (48, 128, 128),
        (16, 576, 64),
        (23, 96, 32),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_int4_equals_its_dequantized_weight(outputs, inputs, group, rows):
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(2, rows, inputs, seed=2)
    codes, scale, zero = quantize_weight(weight, group)
    assert codes.min() == 0
    assert codes.max() == 15
    assert scale.shape == zero.shape == (outputs, inputs // group)
    scale, zero = scale.unsqueeze(2), zero.unsqueeze(2)
    decoded = ((codes.unflatten(1, (-1, group)) - 8) * scale + zero).flatten(1)
    actual = quantized_linear(Dense(weight, bias), WeightFormat(4, group))(x)
    expected = x.bfloat16().float() @ decoded.T + bias
    assert actual.shape == (2, rows, outputs)
    assert (actual - expected).abs().max() < 0.02 * expected.std() + 0.01 * expected.abs().max()


FORMATS = [WeightFormat(4, 32), WeightFormat(8, 32), WeightFormat(8, 32, hierarchical=True)]


@pytest.mark.parametrize(
    "linear",
    [Dense, *((lambda *parts, kind=kind: quantized_linear(Dense(*parts), kind)) for kind in FORMATS)],
    ids=["dense", "int4", "int8", "hierarchical"],
)
@pytest.mark.parametrize("rows", [1, 70])
def test_gated_layers_activate_their_outputs(linear, rows):
    layer, x = linear(random(48, 64), random(48, seed=1)), random(2, rows, 64, seed=2)
    gate, up = layer(x).chunk(2, dim=-1)
    torch.testing.assert_close(layer(x, gated=True), torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_int4_on_cuda_equals_the_cpu(dtype, rows):
    weight, bias, x = random(300, 512), random(300, seed=1), random(2, rows, 512, seed=2)
    parts = quantize_weight(weight, 128)  # once: another device may round a code the other way
    expected = Int4(LibraryInt4Weight.pack(*parts), bias)(x)
    quantized = Int4(Int4Weight.pack(*(part.cuda() for part in parts)), bias.cuda().to(dtype))
    assert quantized.bytes == 304 * 512 * 17 // 32 + bias.numel() * dtype.itemsize  # 300 rows, padded to 304
    actual = quantized(x.cuda().to(dtype))
    assert actual.dtype == dtype
    assert (actual.cpu().float() - expected).abs().max() < 0.02 * expected.std() + 0.01 * expected.abs().max()


def test_storage_is_four_bits_a_weight_and_a_pair_for_each_group():
    packed = quantized_linear(Dense(random(23, 96), random(23, seed=1)), WeightFormat(4, 32))
    # 23 outputs are padded to 32; each has 3 groups of a scale and a zero in 16 bits.
    assert packed.bytes == 32 * 96 // 2 + 32 * 3 * 2 * 2 + 23 * 4
    assert Dense(random(23, 96), random(23, seed=1)).bytes == 23 * 96 * 4 + 23 * 4


def test_constant_groups_stay_finite():
    weight = torch.full((16, 64), 0.25)
    x = torch.ones(1, 64)
    assert torch.allclose(quantized_linear(Dense(weight), WeightFormat(4, 64))(x), torch.full((1, 16), 16.0), rtol=0.01)


def test_8_bit_products_of_many_rows_on_a_cpu_are_the_sums_of_both_planes() -> None:
    torch.manual_seed(0)
    planes = [
        LibraryInt4Weight.pack(torch.randint(0, 16, (24, 64)), torch.rand(24, 2) / 16**index, torch.rand(24, 2))
        for index in range(2)
    ]
    x = torch.randn(2, PLANE_ROWS, 64)

    product = LibraryInt8Weight(*planes)(x)

    torch.testing.assert_close(product, planes[0](x) + planes[1](x))
