"""CUDA C++ kernel of products with dense 16-bit weights (source: linear_dense.cu; see linear_launch.py).

The weight is read as torch's Linear holds it. A slot of the ring is 16 pieces of rows, each a bulk copy of its own, and
padded, so that operands of mma.m16n8k16 load without bank conflicts: weights are the 16-row operand, x is the 8-column
one, and both see the inputs in the order in which 16-byte loads deliver them. Products and sums are float32.

Log on one H200 (us in chains of one graph over weights that do not fit the cache; "alternating" has a small kernel
that reads y and writes x between two products; bf16, one row; cuBLAS takes 12.6 for 4096 x 4096 and 15.7 for 6144 x
4096, alternating 14.6 and 18.2):
- two blocks per multiprocessor, one of this kernel and one of the next, whose ring then fills early: predicted 8.0
  and 12.0, measured 12.0 and 15.1, and with 4-bit weights times that jump between two values: it seems that where a
  block of the kernel before has ended two of the next move in, and other multiprocessors get none. One block: 9.4 and
  13.4.
- a tensor copy of 16 rows at once instead of 16 copies: 12.4, no better.
- the next weight's first bytes into the L2 cache at the end of a product: predicted 1 faster, measured 0.1 to 0.5
  slower.
- full rings flood the memory system, and what others wait for (x, the small kernel's loads) arrives late: 67 KiB
  under way instead of 200 gave 8.6 and 12.6, alternating 12.1 and 15.9; a single copy of 34 KiB as long as x is
  awaited 9.5 and 13.4, alternating 10.4 and 14.3. Products with many row tiles want the full ring once x is there
  (28672 x 4096: 55.8 instead of 57.6).
- the next kernel may start when three items are left, not at the start: alternating 10.4 instead of 11.7.
- x through cp.async of all warps: 12.8 with 16 rows; as bulk copies in four parts 11.8, fetched by pairs of blocks
  11.2.
- bulk copies of the 16 rows by one elected lane without branches between them: 12 instructions a copy, else about 30.
- the norm before a product of one row inside of it, by every block for itself, as a small kernel takes 3 in a chain of
  products: predicted 0.1 ms less a step; measured, in a run whose other times were 1.4% higher, plain steps at 4096
  tokens 4.09 ms instead of 4.01, 4-bit ones 1.72 instead of 1.74 and at 131072 tokens 2.85 instead of 2.84. What a
  launch less saves is lost where every block waits for two rows, adds up squares and meets at barriers.
- the activation after gate and up inside: predicted 2 less a layer, measured 1 to 2 (plain steps 4.06 and 4.01 ms),
  in a chain of such products alone 0.5 to 1.6, with 4-bit weights 0.3 to 0.9.
- barriers set up by all warps, relaxed cluster barriers, sums of a row tile stored at once (see linear_int4_cuda.py for
  the clocks): predicted 0.6 less, measured 0.3 to 1.4, with 16 rows the most. The first item copied before the block's
  warps have met: another 0.1 to 0.3 less for the first two shapes, 0.4 us of a layer's 110, not kept.
- on another H200 the same kernel with full rings took 5 to 9% longer for 128256 x 4096, as did attention in full
  precision, which streams as deep; cuBLAS and cuDNN there 1 to 3% less. With 136 KiB under way instead of the full ring
  it takes 10% longer on a GPU that likes full rings.
- outcome (validate/kernels_h200.json) with 1, 4, 8, 16 rows: 4096 x 4096 8.3, 8.9, 9.2, 10.6; 6144 x 4096 12.2, 12.9,
  13.3, 14.6; 28672 x 4096 53.5, 54.3, 56.6, -; 4096 x 14336 27.8, 28.7, 28.4, -; 128256 x 4096 236, 240, 252, -.
  Alternating, measured before, 10.4, 10.9, 11.6, 14.6 and 14.0, 15.1, 16.4, 18.9 for the first two. Goal was 4.1 TB/s:
  met from 28672 outputs on, and for 4096 x 14336 with one and eight rows (with four 4.09).
- left: x costs 132 times its bytes at the 5.5 TB/s of the L2 cache (17 MB for 16 rows of 4096 inputs), and between
  two kernels the memory is idle for about half a microsecond.
"""

from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda_launch import kernel, launch, machine, takes
from ridgeplan.kernels.linear.dense_schedule import MAX_ROWS, UNIT_INPUTS, make_plan
from ridgeplan.kernels.linear.schedule import Plan


def _kernel(plan: Plan, device: torch.device) -> Any:
    return kernel(plan, device, "the CUDA dense linear kernel does not compile, the library's product runs instead")


def _plan(x: Tensor, weight: Tensor, gated: bool) -> Plan | None:
    outputs, inputs = weight.shape
    return make_plan(len(x), outputs, inputs, x.dtype == torch.bfloat16, gated, machine(x.device))


def fits(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether the kernel takes x [rows, inputs] and weight [outputs, inputs]: up to 16 rows, on Hopper or newer."""
    if not takes(x, MAX_ROWS) or weight.dtype != x.dtype or weight.device != x.device:
        return False
    if not weight.is_contiguous() or weight.data_ptr() % 16 or weight.shape[1] % UNIT_INPUTS:
        return False
    plan = _plan(x, weight, gated)
    return plan is not None and _kernel(plan, x.device) is not None


def linear_dense_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    """See `ridgeplan.kernels.linear.dense.linear_dense`; only for x [rows, inputs] and a weight that `fits`."""
    plan = _plan(x, weight, gated)
    assert plan is not None
    return launch(_kernel(plan, x.device), plan, x, weight, bias)
