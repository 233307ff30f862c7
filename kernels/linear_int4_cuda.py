"""CUDA C++ kernel of products with 4-bit weights (source: linear_int4.cu), compiled at first use.

How it works. Blocks that are all resident at once share the row tiles (16 outputs) of the weight. One thread streams
a tile's codes and scales, which are contiguous, through a ring of bulk copies; the warps cut the inputs between them,
and the x that they need stays in shared memory. Codes become bfloat16 by OR-ing them into the mantissa of 128 and are
the 16-row operand of mma.m16n8k16; a group's product starts at -136 times the group's sum of x, which centres the
codes, and that sum also serves the zero. Where x does not fit, a cluster's blocks cut the inputs, and add up their
sums once, at the end. More than 16 rows are taken in chunks by different blocks, which meet the codes in the cache.

Numerics. Codes and x are exact, products and sums are float32. What is cancelled is 136 times a sum of x that went
through the same arithmetic.

Log on one H200 (group 128; us in a graph over weights that do not fit the cache, x in it; cuBLAS in bf16 takes 13.4
for 4096 x 4096 and 56 for 28672 x 4096; a kernel that only reads the codes 4.3 and 16.6):
- first version, a ring of 2 KiB copies per warp: predicted 5 and 17 with one row, measured 6.4 and 25. Copies of 4 KiB
  gave 23, so the cost of a copy counts, not the traffic.
- one ring per block with copies of 17 KiB: predicted 20, measured 24; without the arithmetic 20. 0.4 instructions a
  clock and scheduler from two warps each, which wait for each other at every item. Items of 34 KiB: 22.3.
- 16 warps instead of 8, predicted to hide that: 22.7. All warps still wait at the same barrier.
- cluster barriers took half a microsecond a row tile (4096 x 14336, 16 rows: 24.6); one at the end: 20.5.
- full rings at the start delay x, which arrives behind them: a ring of 105 KiB instead of 210 was predicted to save a
  few us of 28672 x 4096, and saved 2 (20.0). Filling the ring slowly instead cost up to 4.
- two blocks per multiprocessor, each with its own barriers: 5.6 and 20.4 with one row; lm_head (128256 x 4096) 68
  instead of 70, 4.1 TB/s. With more rows x is read twice as often and it does not pay.
- the first item before x: 0.5 slower with one row, but 0.3 to 1.0 faster with 4 and 8 rows where x is not in the cache.
- x fetched once for a cluster of two or four (multicast), predicted to save 1 us with 16 rows: 0.4 for two blocks, and
  as much lost with 4 and 8 rows, so not kept.
- left: about 1 us between the last bytes and the outputs, and the traffic of x, 132 copies of it through the L2 (17 MB
  for 16 rows of 4096 inputs, at 5 TB/s), which is why 4096 x 4096 takes 6.8 with 4 rows and 8.9 with 16.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.int4_weight import Int4Weight
from ridgeplan.kernels.linear_int4_plan import (
    MAX_ROWS,
    RESERVED_BYTES,
    SPLITS,
    WARPS,
    Machine,
    Plan,
    Variant,
    make_plan,
)
from ridgeplan.kernels.nvrtc import compiled, joined


class LaunchShape(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _compiled(source: str, name: str, options: tuple[str, ...], device: torch.device) -> Any:
    """A kernel that may use all of a block's shared memory; None, with one warning, where it does not compile."""
    failing = "the CUDA int4 linear kernel does not compile, Triton's runs instead"
    shared_bytes = _shared_bytes(device) - RESERVED_BYTES
    return compiled(source, name, options, device, shared_bytes=shared_bytes, failing=failing)


@cache
def source() -> str:
    """The kernel's source, whole."""
    return joined("linear_int4_instructions.cu", "linear_int4.cu")


def _kernel(variant: Variant, device: torch.device) -> Any:
    return _compiled(source(), "linear", variant.options, device)


def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@cache
def _machine(device: torch.device) -> Machine:
    return Machine(_shared_bytes(device), tuple(_clusters(splits, device) for splits in SPLITS))


def _clusters(size: int, device: torch.device) -> int:
    """Clusters of `size` blocks that the device holds at once: its processors come in groups of uneven size."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    source = f'extern "C" __global__ void __cluster_dims__({size}, 1, 1) probe() {{}}'
    kernel = _compiled(source, "probe", (), device)
    count = ctypes.c_int(0)
    if kernel is not None:
        shape = LaunchShape(size * (processors // size), 1, 1, 32 * WARPS, 1, 1, _shared_bytes(device) - RESERVED_BYTES)
        driver = torch.cuda._utils._get_gpu_runtime_library()
        driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel.func, ctypes.byref(shape))
    return count.value or processors // size


def _plan(x: Tensor, weight: Int4Weight) -> Plan | None:
    is_bf16 = x.dtype == torch.bfloat16
    return make_plan(len(x), weight.outputs, weight.inputs, weight.group, is_bf16, _machine(x.device))


def fits(x: Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel takes x [rows, inputs]: 1 to 64 rows of a 16-bit dtype, on Hopper or newer."""
    if not x.is_cuda or torch.version.cuda is None or not 1 <= len(x) <= MAX_ROWS:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous() or x.data_ptr() % 16:
        return False
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    plan = _plan(x, weight)
    return plan is not None and _kernel(plan.variant, x.device) is not None


def linear_int4_cuda(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """See `ridgeplan.kernels.linear_int4.linear_int4`; only for x [rows, inputs] that `fits`."""
    plan = _plan(x, weight)
    assert plan is not None
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    shape = [len(x), weight.inputs, weight.outputs, plan.chunk_rows, plan.items]
    with torch.cuda.device(x.device):
        _kernel(plan.variant, x.device)(
            (plan.clusters * plan.variant.cut.splits, plan.chunks, 1),
            (32 * WARPS, 1, 1),
            [x, weight.packed, out if bias is None else bias, out, int(bias is not None), *shape],
            plan.shared_bytes,
        )
    return out
