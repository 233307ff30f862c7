"""SwiGLU, the gated activation of the MLP."""

from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline.cost import Cost


def swiglu(gate_up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(gate) * up, [..., I], of gate_up [..., 2 I]: the gate first, then up (Shazeer, 2020, eq. 6).

    silu is rounded to the tensor's dtype before the product, as in transformers. Raises ValueError when the last
    dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up share the last dimension, which is {gate_up.shape[-1]}; allowed: even widths")
    if not uses_gpu_kernel(backend, gate_up):
        return swiglu_reference(gate_up)
    from ridgeplan.kernels.layer.swiglu_triton import swiglu_triton

    return swiglu_triton(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def swiglu_cost(gate_up: Tensor) -> Cost:
    """What `swiglu` moves: `ridgeplan.roofline.ops.swiglu` at the size of this tensor."""
    return Cost(flops=4 * gate_up.numel(), read_bytes=gate_up.nbytes, write_bytes=gate_up.nbytes // 2)
