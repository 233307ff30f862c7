"""Residual addition and RMSNorm in one pass over memory."""

from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.roofline.cost import Cost


def add_rms_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(hidden + update, RMSNorm of that): hidden and update [..., H], weight [H]; without update `hidden` itself.

    RMSNorm (Zhang and Sennrich, 2019, eq. 4) as in Llama: the sum is rounded to the model's dtype, statistics and
    scaling are float32, and the result is rounded once. On Hopper and newer GPUs the weight is read while earlier
    kernels of the stream may still run (see device/launch.py). Raises ValueError when shapes disagree.
    """
    if weight.shape != hidden.shape[-1:]:
        raise ValueError(f"weight {list(weight.shape)} does not fit hidden states {list(hidden.shape)}")
    if update is not None and update.shape != hidden.shape:
        raise ValueError(f"update {list(update.shape)} must have the shape of hidden, {list(hidden.shape)}")
    if not uses_gpu_kernel(backend, hidden):
        return add_rms_norm_reference(hidden, update, weight, eps)
    from ridgeplan.kernels.layer.norm_triton import add_rms_norm_triton

    return add_rms_norm_triton(hidden, update, weight, eps)


def add_rms_norm_reference(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    total = hidden if update is None else hidden + update
    return total, functional.rms_norm(total, weight.shape, weight, eps)


def add_rms_norm_cost(hidden: Tensor, update: Tensor | None, weight: Tensor) -> Cost:
    """What `add_rms_norm` moves: `ridgeplan.roofline.ops.add_rms_norm` at the sizes of these tensors."""
    streams = 1 if update is None else 2
    return Cost(
        flops=4 * streams * hidden.numel(),
        read_bytes=streams * hidden.nbytes + weight.nbytes,
        write_bytes=streams * hidden.nbytes,
    )
