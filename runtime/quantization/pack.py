"""Packing of dense linear layers into 4-bit and 8-bit ones, in the layout of the device's kernel."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.linear.quantized.int4_weight import Int4Weight
from ridgeplan.kernels.linear.quantized.int8_weight import Int8Weight, split_codes
from ridgeplan.roofline import execution
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.linear import Dense, Int4, Int8, LibraryInt4Weight, LibraryInt8Weight
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization.gptq import Parts, quantize_planes, quantize_weight


def quantized_linear(dense: Dense, target: WeightFormat, hessian: Tensor | None = None) -> Int4 | Int8:
    """A copy of a dense layer in the format `target`; a group that does not divide its inputs becomes 64 or 32.

    hessian: that of the layer's inputs, as for `quantize_weight`. Raises ModelError if no group fits.
    """
    assert target.group is not None, "a format of codes"
    weight, group = dense.weight, fitting_group(dense.weight.shape[1], target.group)
    if target.bits == 4:
        return int4_of(quantize_weight(weight, group, hessian), dense.bias)
    if target.hierarchical:
        return int8_of(quantize_planes(weight, group, hessian), dense.bias, hierarchical=True)
    return int8_of(split_codes(*quantize_weight(weight, group, hessian, bits=8)), dense.bias)


def int4_of(parts: Parts, bias: Tensor | None) -> Int4:
    """The layer of 4-bit codes, scale and zero."""
    packing = Int4Weight if parts[0].is_cuda else LibraryInt4Weight
    return Int4(packing.pack(*parts), bias)


def int8_of(planes: tuple[Parts, Parts], bias: Tensor | None, hierarchical: bool = False) -> Int8:
    """The layer of two planes of 4-bit codes, each with scale and zero."""
    upper, lower = (int4_of(parts, None).weight for parts in planes)
    if isinstance(upper, Int4Weight) and isinstance(lower, Int4Weight):
        return Int8(Int8Weight(upper, lower), bias, hierarchical)
    assert isinstance(upper, LibraryInt4Weight) and isinstance(lower, LibraryInt4Weight)
    return Int8(LibraryInt8Weight(upper, lower), bias, hierarchical)


def fitting_group(inputs: int, group: int) -> int:
    """`ridgeplan.roofline.execution.fitting_group`. Raises ModelError if no group divides the inputs."""
    fitting = execution.fitting_group(inputs, group)
    if fitting is None:
        raise ModelError(f"a linear layer has {inputs} inputs; allowed for 4-bit weights: multiples of 32")
    return fitting
