"""Packing of dense linear layers into 4-bit ones, in the layout of the device's kernel."""

from __future__ import annotations

from torch import Tensor

from ridgeplan.kernels.linear.int4_weight import Int4Weight
from ridgeplan.roofline import execution
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.linear import Dense, Int4, LibraryInt4Weight
from ridgeplan.runtime.quantization.gptq import quantize_weight


def int4_linear(dense: Dense, group: int, hessian: Tensor | None = None) -> Int4:
    """A 4-bit copy of a dense layer; a `group` that does not divide its inputs becomes 64 or 32.

    hessian: that of the layer's inputs, as for `quantize_weight`. Raises ModelError if no group fits.
    """
    group = fitting_group(dense.weight.shape[1], group)
    packing = Int4Weight if dense.weight.is_cuda else LibraryInt4Weight
    return Int4(packing.pack(*quantize_weight(dense.weight, group, hessian)), dense.bias)


def fitting_group(inputs: int, group: int) -> int:
    """`ridgeplan.roofline.execution.fitting_group`. Raises ModelError if no group divides the inputs."""
    fitting = execution.fitting_group(inputs, group)
    if fitting is None:
        raise ModelError(f"a linear layer has {inputs} inputs; allowed for 4-bit weights: multiples of 32")
    return fitting
