"""A product of what RMSNorm leaves: in one kernel for one row on CUDA, else one after the other."""

from torch import Tensor

from ridgeplan.kernels.backend import Backend
from ridgeplan.kernels.int4_weight import Int4Weight
from ridgeplan.kernels.linear_dense import linear_dense, linear_dense_cost
from ridgeplan.kernels.linear_dense_cuda import fits as dense_fits
from ridgeplan.kernels.linear_dense_cuda import linear_dense_cuda
from ridgeplan.kernels.linear_int4 import linear_int4, linear_int4_cost
from ridgeplan.kernels.linear_int4_cuda import fits as int4_fits
from ridgeplan.kernels.linear_int4_cuda import linear_int4_cuda
from ridgeplan.kernels.norm import Norm, add_rms_norm, add_rms_norm_cost
from ridgeplan.roofline.cost import Cost


def normed_linear(
    hidden: Tensor,
    norm: Norm,
    weight: Tensor | Int4Weight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """hidden + update as `add_rms_norm` returns it, and the product with what is normed.

    hidden: [..., inputs]. weight: as of `linear_dense`, whose product it is, or of `linear_int4`. On CUDA one row is
    normed inside of the product's kernel, by every block for itself, which takes less time than a kernel that waits for
    the one before and is waited for. Raises ValueError as these functions do.
    """
    if backend == "auto" and hidden.numel() == hidden.shape[-1]:
        found = _in_one_kernel(hidden, norm, weight, bias, gated)
        if found is not None:
            return found
    total, normed = add_rms_norm(hidden, norm.update, norm.weight, norm.eps, backend=backend)
    if isinstance(weight, Int4Weight):
        return total, linear_int4(normed, weight, bias, gated=gated, backend=backend)
    return total, linear_dense(normed, weight, bias, gated=gated, backend=backend)


def normed_linear_cost(hidden: Tensor, norm: Norm, weight: Tensor | Int4Weight, gated: bool = False) -> Cost:
    """Declared cost of `normed_linear` in one kernel: the product's and the norm's, but what is normed stays inside."""
    product = linear_int4_cost if isinstance(weight, Int4Weight) else linear_dense_cost
    inside = Cost(read_bytes=-hidden.nbytes, write_bytes=-hidden.nbytes)
    return product(hidden, weight, gated) + add_rms_norm_cost(hidden, norm.update, norm.weight) + inside


def _in_one_kernel(
    hidden: Tensor, norm: Norm, weight: Tensor | Int4Weight, bias: Tensor | None, gated: bool
) -> tuple[Tensor, Tensor] | None:
    """None where the kernels do not take it."""
    if norm.update is not None and norm.update.shape != hidden.shape:
        return None
    row, update = hidden.reshape(1, -1), None if norm.update is None else norm.update.reshape(1, -1)
    of_row, narrow = Norm(update, norm.weight, norm.eps), None if bias is None else bias.to(hidden.dtype).contiguous()
    if isinstance(weight, Int4Weight):
        if row.shape[1] != weight.inputs or not int4_fits(row, weight, gated, of_row):
            return None
        total, out = linear_int4_cuda(row, weight, narrow, gated, of_row)
    else:
        if row.shape[1] != weight.shape[1] or not dense_fits(row, weight, gated, of_row):
            return None
        total, out = linear_dense_cuda(row, weight, narrow, gated, of_row)
    return total.view(hidden.shape), out.view(*hidden.shape[:-1], -1)
