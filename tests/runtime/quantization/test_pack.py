"""Dense layers become 4-bit ones."""

import pytest
import torch

from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.linear import Dense, LibraryInt4Weight
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.calibration import fitting_group, quantized_linear
from ridgeplan.runtime.quantization.gptq import quantize_weight


@pytest.mark.parametrize(
    "inputs, group, expected",
    [
        (576, 128, 64),
        (1536, 128, 128),
        (4096, 128, 128),
        (96, 128, 32),
        (64, 32, 32),
        (512, 256, 256),
    ],
)
def test_group_falls_to_what_divides_the_inputs(inputs, group, expected):
    assert fitting_group(inputs, group) == expected


def test_inputs_without_a_group_are_refused():
    with pytest.raises(ModelError, match="has 100 inputs; allowed for 4-bit weights: multiples of 32"):
        fitting_group(100, 128)


def test_a_layer_is_quantized_for_its_inputs():
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in [(16, 64), (16,), (100, 64)])
    hessian = x.T @ x
    packed = quantized_linear(Dense(weight, bias), WeightFormat(4, 128), hessian)
    expected = LibraryInt4Weight.pack(*quantize_weight(weight, 64, hessian))
    assert torch.equal(packed.weight.packed, expected.packed)
    assert torch.equal(packed.weight.scales, expected.scales)
    assert packed.bias is bias
