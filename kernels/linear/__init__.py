"""Linear layers for few rows, y = x W^T + bias, with dense, 4-bit and 8-bit weights.

Not here: which layers are quantized, and on which calibration data (runtime/quantization).
"""

from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.layer import swiglu
from ridgeplan.kernels.linear.cuda import find_dense_kernel, find_quantized_kernel
from ridgeplan.kernels.linear.gguf import SLAB_ELEMENTS, GgufWeight
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline import ops
from ridgeplan.roofline.cost import Cost


def linear_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, backend: Backend = "auto"
) -> Tensor:
    """x W^T + bias -> [..., outputs] in x's dtype, sums in float32; gated, `swiglu` of that, [..., outputs / 2].

    x: [..., inputs]; weight: [outputs, inputs] as torch's Linear holds it; bias: [outputs]. On CUDA, few rows of 16
    bits run in CUDA C++ on Hopper and newer; everything else, and every backend but "auto", is the library's product.
    The CUDA kernel reads the weight while earlier kernels of the stream may still run (see device/cuda.py). If gated,
    it does not round between the product and the activation.
    Raises ValueError when x does not match the weight's inputs, or the bias its outputs.
    """
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {inputs} inputs")
    require_bias(bias, outputs, x)
    uses_gpu_kernel(backend, x)  # raises ValueError for an unknown backend
    rows = x.reshape(-1, inputs)
    kernel = find_dense_kernel(rows, weight, gated) if backend == "auto" else None
    if kernel is not None:
        narrow = None if bias is None else bias.to(x.dtype).contiguous()
        return kernel.run(rows, weight, bias=narrow).view(*x.shape[:-1], -1)
    if gated:
        return swiglu(linear_dense(x, weight, bias, backend=backend), backend=backend)
    return linear_dense_reference(x, weight, bias)


def require_bias(bias: Tensor | None, outputs: int, x: Tensor) -> None:
    """Raises ValueError for a bias that is not [outputs] on x's device."""
    if bias is not None and (bias.shape != (outputs,) or bias.device != x.device):
        raise ValueError(f"bias is {list(bias.shape)} on {bias.device}; allowed: [{outputs}] on {x.device}")


def linear_dense_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The library's product."""
    return functional.linear(x, weight, bias)


QuantizedWeight = Int4Weight | Int8Weight


def linear_quantized(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, gated: bool = False, backend: Backend = "auto"
) -> Tensor:
    """x W^T + bias -> [..., outputs] in x's dtype, sums in float32; gated, `swiglu` of that, [..., outputs / 2].

    x: [..., inputs]; bias: [outputs], rounded to x's dtype. On CUDA, up to 64 rows of a 16-bit dtype run in CUDA C++
    on Hopper and newer, other few rows in a Triton kernel, and many rows in the library's product with a dense copy, a
    slab of outputs at a time. The CUDA kernel reads the weight while earlier kernels of the stream may still run (see
    device/cuda.py). If gated, it does not round between the product and the activation.
    Raises ValueError when x does not match the weight's inputs, or the bias its outputs.
    """
    if x.shape[-1] != weight.inputs:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {weight.inputs} inputs")
    require_bias(bias, weight.outputs, x)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    rows = x.reshape(-1, weight.inputs)
    on_gpu = uses_gpu_kernel(backend, x)
    kernel = find_quantized_kernel(rows, weight, gated) if on_gpu and backend == "auto" else None
    if kernel is not None:
        return kernel.run(rows, *(plane.packed for plane in weight.planes), bias=bias).view(*x.shape[:-1], -1)
    if gated:
        return swiglu(linear_quantized(x, weight, bias, backend=backend), backend=backend)
    if not on_gpu:
        out = linear_quantized_reference(rows, weight, bias)
    else:
        from ridgeplan.kernels.linear.triton import linear_quantized_triton

        out = linear_quantized_triton(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.outputs)


def linear_quantized_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """The same in plain torch, in float32 throughout."""
    return functional.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def linear_gguf(
    x: Tensor, weight: GgufWeight, bias: Tensor | None = None, *, gated: bool = False, backend: Backend = "auto"
) -> Tensor:
    """x W^T + bias -> [..., outputs] in x's dtype, sums in float32; gated, `swiglu` of that, [..., outputs / 2].

    Arguments as for `linear_quantized`. The weight is rounded to x's dtype, as a dense one would be. On CUDA it is
    Triton's kernel on every GPU, as that of CUDA C++ takes scales and zeros in bfloat16; many rows go through dense
    copies.
    """
    if x.shape[-1] != weight.inputs:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {weight.inputs} inputs")
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    rows = x.reshape(-1, weight.inputs)
    if uses_gpu_kernel(backend, x):
        from ridgeplan.kernels.linear.gguf_triton import linear_gguf_triton

        out = linear_gguf_triton(rows, weight, bias)
    else:
        out = linear_gguf_reference(rows, weight, bias)
    out = out.view(*x.shape[:-1], weight.outputs)
    return swiglu(out, backend=backend) if gated else out


def linear_gguf_reference(x: Tensor, weight: GgufWeight, bias: Tensor | None) -> Tensor:
    """The same in plain torch, with a dense copy of a few outputs at a time."""
    out = x.new_empty(len(x), weight.outputs)
    for slab in weight.slabs():
        out[:, slab] = functional.linear(x, weight.rows(slab).dequantize(x.dtype))
    return out if bias is None else out.add_(bias)


def gguf_rows(weight: GgufWeight, ids: Tensor, out: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Writes the weight's rows `ids` [count], int64, into out [count, inputs], and returns it."""
    if uses_gpu_kernel(backend, ids):
        from ridgeplan.kernels.linear.gguf_triton import copy_rows

        copy_rows(weight, out, ids=ids.contiguous())
        return out
    slab_rows = max(1, SLAB_ELEMENTS // weight.inputs)
    for some, rows in zip(ids.split(slab_rows), out.split(slab_rows), strict=True):
        rows.copy_(weight.rows(some).dequantize())
    return out


def linear_cost(x: Tensor, outputs: int, weight_bytes: float, gated: bool = False) -> Cost:
    """Cost of `linear_dense` or `linear_quantized` with a weight of `outputs` rows, of `weight_bytes` per parameter."""
    inputs = x.shape[-1]
    sizes = x.numel() // inputs, inputs, outputs // 2 if gated else outputs, inputs * outputs
    return ops.matmul(*sizes, weight_bytes, x.element_size())
