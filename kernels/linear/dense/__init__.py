"""Dense linear layers: y = x W^T + bias, with a CUDA kernel for few rows, which are bound by reading the weight.

Not here: what both kinds of products share, the CUDA sources and their launch (kernels/linear).
"""

from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.layer.swiglu import swiglu
from ridgeplan.kernels.linear.dense.cuda import find_kernel
from ridgeplan.roofline.cost import Cost


def linear_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, backend: Backend = "auto"
) -> Tensor:
    """x W^T + bias -> [..., outputs] in x's dtype, sums in float32; gated, `swiglu` of that, [..., outputs / 2].

    x: [..., inputs]; weight: [outputs, inputs] as torch's Linear holds it; bias: [outputs]. On CUDA, few rows of 16
    bits run in CUDA C++ on Hopper and newer; everything else, and every backend but "auto", is the library's product.
    The CUDA kernel reads the weight while earlier kernels of the stream may still run (see device/launch.py). If gated,
    it does not round between the product and the activation.
    Raises ValueError when x does not match the weight's inputs, or the bias its outputs.
    """
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {inputs} inputs")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias {list(bias.shape)} does not fit a weight of {outputs} outputs")
    uses_gpu_kernel(backend, x)  # raises ValueError for an unknown backend
    rows = x.reshape(-1, inputs)
    kernel = find_kernel(rows, weight, gated) if backend == "auto" else None
    if kernel is not None:
        narrow = None if bias is None else bias.to(x.dtype).contiguous()
        return kernel.run(rows, weight, bias=narrow).view(*x.shape[:-1], -1)
    if gated:
        return swiglu(linear_dense(x, weight, bias, backend=backend), backend=backend)
    return linear_dense_reference(x, weight, bias)


def linear_dense_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The library's product."""
    return functional.linear(x, weight, bias)


def linear_dense_cost(x: Tensor, weight: Tensor, gated: bool = False) -> Cost:
    """Declared cost of `linear_dense`: the weight and x read once; outputs, or their gated half, written once."""
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    return Cost(
        flops=2 * rows * outputs * inputs,
        read_bytes=weight.nbytes + x.numel() * x.element_size(),
        write_bytes=rows * (outputs // 2 if gated else outputs) * x.element_size(),
    )
