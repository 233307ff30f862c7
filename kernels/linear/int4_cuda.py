"""CUDA C++ kernel of products with 4-bit weights (source: linear_int4.cu; see linear_launch.py).

Codes become bfloat16 by OR-ing them into the mantissa of 128 and are the 16-row operand of mma.m16n8k16; a group's
product starts at -136 times the group's sum of x, which centres the codes, and that sum also serves the zero (of a
block's first row tile it comes out with the product, and is added after). More than 16 rows are taken in chunks by
different blocks, which meet the codes in the cache.

Numerics. Codes and x are exact, products and sums are float32. What is cancelled is 136 times a sum of x that went
through the same arithmetic.

Log on one H200 (group 128; us in a graph over weights that do not fit the cache, x in it; cuBLAS in bf16 takes 12.6
for 4096 x 4096, 15.7 for 6144 x 4096, 58 for 28672 x 4096, 32 for 4096 x 14336):
- first version, a ring of 2 KiB copies per warp: predicted 5 and 17 (4096 and 28672 outputs) with one row, measured
  6.4 and 25. Copies of 4 KiB gave 23, so the cost of a copy counts, not the traffic.
- one ring per block with copies of 17 KiB: predicted 20, measured 24; without the arithmetic 20.
- cluster barriers took half a microsecond a row tile (4096 x 14336, 16 rows: 24.6); one at the end: 20.5.
- two blocks per multiprocessor, each with its own barriers: 5.6 and 20.4 with one row.
- warps that copy, multiply and add up, meeting only at barriers of the ring, and launched early: 5.2 and 22. Items of
  34 KiB instead of 17, two units of a warp at once: 4.9 and 19.5.
- one item under way instead of six, as a flood of copies delays x: 4.5 and 18.9; 6144 x 4096 5.7 instead of 6.5. Long
  products want two: 18.1.
- x costs 132 times its bytes at the 5.5 TB/s of the L2 cache: 0.8, 1.6 and 3.1 with 4, 8 and 16 rows of 4096 inputs.
  Pairs of blocks that fetch it together: 4.9 instead of 5.2 and 5.6 instead of 6.0 with 4 and 8 rows; cutting the
  inputs between them instead: 6.7 with 8. Fours and eights, predicted to save another 0.8 with 16 rows: slower by 0.2
  to 0.7 with any number of rows, as more blocks wait for the slowest.
- multipliers that poll for x slow down small kernels beside them: alternating with one (4 rows) 8.1; waiting for the
  kernel before like the others 7.3.
- 16 warps instead of 8: no faster, and with their registers a small kernel finds no room.
- clocks inside of the kernel (4096 x 4096, one row, 4.5): 1150 of a block's 1830 cycles before its first copy set up
  barriers, 75 each, by lanes of one warp one after the other: now every warp sets up a few. The cluster's barrier, as a
  release, was a fence of all of the GPU's memory, 400 cycles, 1500 with copies under way: relaxed, and what a cluster
  adds up is counted by a barrier of its receiver. Sums of x took a pass of their own, 900 to 1200 cycles: products of
  the first row tile find them for 450, where unpacking keeps the integer units busy and tensor cores have time. Sums of
  a row tile were stored one after the other, 1500 cycles with 16 rows, 500 all at once. Predicted 0.6 to 1.2, measured
  4.4, 4.9, 5.3 and 6.9 with 1, 4, 8 and 16 rows instead of 4.5, 5.0, 5.7 and 7.9.
- a first item of the weight copied before the block's warps have met: x, though in the L2 cache, comes 900 cycles later
  behind it. x through ordinary loads of the warps: no earlier.
- blocks of half the shared memory, so that the next kernel's fill their rings during this one: alternating shapes as in
  a layer 55 instead of 39, as they pile up; chains of one shape 5.4 instead of 5.5 (6144 x 4096), 19.4 instead of 17.2
  (28672 x 4096, in items of half the size).
- shifts as multiplications (IMAD.HI), since the integer units are what a tile waits for: slower by 1 to 3% for each of
  the three shifts of a word.
- the next weight's first 8 to 128 KiB a block into the L2 cache, at the end of a product: predicted 1 faster, measured
  39.4 to 40.8 instead of 39.5 for the four products of an 8B layer, which a perfect stream reads in 27. So the memory
  is not what a product's beginning waits for.
- outcome (validate/kernels_h200.json) with 1, 4, 8, 16 rows: 4096 x 4096 4.3, 4.7, 5.2, 6.7; 6144 x 4096 5.3, 5.8,
  6.4, 8.3; 28672 x 4096 17.0, 18.4, 18.7, 24.7; 4096 x 14336 10.5, 11.4, 11.9, 16.5; 128256 x 4096 65, 68, 69, 94.
  Goals (2.8, 2.6, 2.3 and 1.8 times cuBLAS) are met. The activation after gate and up inside: see linear_dense_cuda.py.
- left: in a short product all waits for x behind the first copies of the weight, and for the end of the kernel before;
  a row tile takes 900 cycles of the integer units, in which its last codes wait for nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda_launch import kernel, launch, machine, takes
from ridgeplan.kernels.linear.int4_schedule import MAX_ROWS, make_plan
from ridgeplan.kernels.linear.int4_weight import Int4Weight
from ridgeplan.kernels.linear.schedule import Plan


def _kernel(plan: Plan, device: torch.device) -> Any:
    return kernel(plan, device, "the CUDA int4 linear kernel does not compile, Triton's runs instead")


def _plan(x: Tensor, weight: Int4Weight, gated: bool) -> Plan | None:
    is_bf16 = x.dtype == torch.bfloat16
    return make_plan(len(x), weight.outputs, weight.inputs, weight.group, is_bf16, gated, machine(x.device))


def fits(x: Tensor, weight: Int4Weight, gated: bool = False) -> bool:
    """Whether the kernel takes x [rows, inputs]: 1 to 64 rows of a 16-bit dtype, on Hopper or newer."""
    if not takes(x, MAX_ROWS) or weight.packed.device != x.device:
        return False
    plan = _plan(x, weight, gated)
    return plan is not None and _kernel(plan, x.device) is not None


def linear_int4_cuda(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool = False) -> Tensor:
    """See `ridgeplan.kernels.linear.int4.linear_int4`; only for x [rows, inputs] that `fits`."""
    plan = _plan(x, weight, gated)
    assert plan is not None
    return launch(_kernel(plan, x.device), plan, x, weight.packed, bias)
