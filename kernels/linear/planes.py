"""Rows of x as planes of bytes, which products of integers take (csrc/integer.cuh): uint8 [inputs / 128 * rows * 264].

x of a row and a group of 128 inputs is scale * q, with integers q = 256 upper + lower of 16 bits: the scale is the
group's largest magnitude over 32639 = 256 * 127 + 127, so that both planes are signed bytes.

    planes  [group, row, plane 2, c 4, p 4, step 2] words: inputs 32 p + 8 c + 4 step + {0, 2, 1, 3} of the group
    pairs   [group, row] of (scale, sum of q) in float32, after all planes
"""

import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend, uses_gpu_kernel
from ridgeplan.kernels.layer import add_rms_norm_reference

GROUP = 128  # inputs that share a scale
LARGEST = 256 * 127 + 127
SMALLEST = 1e-30  # a group whose largest magnitude is not above counts as zero
ROW_BYTES, PAIR_BYTES = 2 * GROUP, 8  # of a row of a group


def quantize_rows(x: Tensor) -> Tensor:
    """The planes of x [rows, inputs]. Raises ValueError for inputs that are no multiple of 128."""
    data, rows = empty_planes(x), len(x)
    groups = x.float().view(rows, -1, GROUP).transpose(0, 1)
    largest = groups.abs().amax(2, keepdim=True)
    integers = torch.where(largest > SMALLEST, groups * (LARGEST / largest), 0).round().int()
    upper = integers + 128 >> 8
    both = torch.stack([upper, integers - 256 * upper], dim=2).to(torch.int8)
    # [group, row, plane, p, c, step, high bit, low bit of an input] to the order of the module's docstring
    planes, pairs = plane_views(data)
    planes.copy_(both.view(-1, rows, 2, 4, 4, 2, 2, 2).permute(0, 1, 2, 4, 3, 5, 7, 6).flatten())
    pairs.copy_(torch.cat([largest / LARGEST, integers.sum(2, keepdim=True)], dim=2).flatten())
    return data


def empty_planes(x: Tensor) -> Tensor:
    """Memory for the planes of x."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"{x.shape[-1]} inputs; allowed: multiples of {GROUP}")
    return torch.empty(x.numel() // GROUP * (ROW_BYTES + PAIR_BYTES), dtype=torch.uint8, device=x.device)


def plane_views(data: Tensor) -> tuple[Tensor, Tensor]:
    """Planes as int8, and pairs as float32, both flat."""
    end = len(data) // (ROW_BYTES + PAIR_BYTES) * ROW_BYTES
    return data[:end].view(torch.int8), data[end:].view(torch.float32)


def add_rms_norm_planes(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of hidden [rows, H], whose norm, rounded to hidden's dtype, becomes planes in the same kernel.

    Raises ValueError for an H that is no multiple of 128.
    """
    if not uses_gpu_kernel(backend, hidden):
        total, normed = add_rms_norm_reference(hidden, update, weight, eps)
        return total, quantize_rows(normed)
    from ridgeplan.kernels.layer.triton import add_rms_norm_triton

    data = empty_planes(hidden)
    return add_rms_norm_triton(hidden, update, weight, eps, plane_views(data))[0], data
