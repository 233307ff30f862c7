"""CUDA C++ kernel of hierarchical quantization (source: quantize_steps.cu, quantize.cu), compiled at first use.

How it works. A block takes one group of one KV head, keys or values, into registers with one wave of
loads. A lane holds the elements whose codes share bytes, so nothing is interleaved; ranges are found on packed pairs
of 16-bit elements; rounding is an addition. Value codes turn over in shared memory and leave as whole rows.

Log on one H200 (8 KV heads of 128, both planes; 2048 / 32768 / 131072 tokens in us; a copy at 4.28 TB/s of the same
bytes takes 3.0 / 48 / 192):
- Triton with a division, rounding to integers and back for each element: 22 / 313 / 1186, about 40 instructions an
  element, of which conversions run at an eighth of the rate.
- Triton with a reciprocal and rounding by addition, keys and values apart: predicted half, measured 12.7 / 119 / 438.
  Its transposition stores single bytes, its reductions shuffle 3 times an element.
- this kernel with four warps: predicted 15 instructions an element, so bound by memory; measured 10.0 / 58.7 / 208.
- eight warps, half the code for each thread: predicted less time in cold instructions; measured 7.1 / 56 / 204.
- the group's index awaited after the elements: predicted 0.6 less, measured 6.8 / 55 / 201. Warm, 2048 tokens take 5.0.
- in a chain over rotating prompts in one graph (validate/kernels_h200.json), started early: 6.3 / 51.
- blocks of half a group (channels of keys, tokens of values), so that arithmetic hides behind loads: predicted 5.8 with
  2048 tokens, measured 6.2 / 65.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.device.launch import launch_with_pdl
from ridgeplan.kernels.device.nvrtc import compiled, joined
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

GROUP = 128
HEAD_DIMS = (64, 128)
STREAMS = 16  # tokens that a block reads at once, HEAD_DIM / 8 threads for each
ALIGNMENT = 8  # elements of 16 bytes: what a lane loads at once
MOST_GROUPS = 65535  # blocks of the grid's second axis


def source() -> str:
    """All of the CUDA C++."""
    return joined("kv_cache", "affine.cuh", "quantize.cu")


def options(head_dim: int, planes: int, bf16: bool) -> list[str]:
    """Of the compiler: what a kernel is specialized for."""
    return [f"-DHEAD_DIM={head_dim}", f"-DPLANES={planes}", *(["-DBF16"] if bf16 else [])]


@cache
def _kernel(head_dim: int, planes: int, bf16: bool, device: torch.device) -> Any | None:
    """Compiles a variant, or None (with a warning, once) where that fails."""
    failing = "the CUDA quantization kernel does not compile, Triton's runs instead"
    return compiled(source(), "quantize", options(head_dim, planes, bf16), device, failing=failing)


def fits(keys: Tensor, values: Tensor, out: QuantizedKV) -> bool:
    """Whether the CUDA kernel computes this call; what it does not, Triton's does.

    It needs Hopper or newer (as it was measured there), groups of 128, head_dim 64 or 128, one 16-bit dtype and rows
    that 16-byte loads can read.
    """
    if not keys.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(keys.device) < (9, 0):
        return False
    if out.group != GROUP or out.head_dim not in HEAD_DIMS or keys.shape[2] > MOST_GROUPS * GROUP:
        return False
    if keys.dtype not in (torch.bfloat16, torch.float16) or values.dtype != keys.dtype:
        return False
    return all(map(_aligned, (keys, values))) and _kernel_of(keys, out) is not None


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and not any(stride % ALIGNMENT for stride in tensor.stride()[:-1])


def _kernel_of(keys: Tensor, out: QuantizedKV) -> Any | None:
    return _kernel(out.head_dim, out.planes, keys.dtype == torch.bfloat16, keys.device)


def quantize_cuda(
    keys: Tensor,
    values: Tensor,
    out: QuantizedKV,
    group_index: Tensor,
    mask: Tensor | None,
    first_slot: Tensor | None,
) -> None:
    """See `ridgeplan.kernels.kv_cache.quantize`; only for calls that `fits`."""
    kernel = _kernel_of(keys, out)
    assert kernel is not None
    batch, kv_heads, tokens, _ = keys.shape
    groups = tokens // GROUP if first_slot is None else 1
    group_index = group_index.contiguous()
    # Where there is no mask or no slot, any pointer will do.
    masking: list[Tensor | int] = [group_index, 0] if mask is None else [mask.contiguous(), 1]
    placing: list[Tensor | int] = [group_index, 0] if first_slot is None else [first_slot.contiguous(), 1]
    strides = [stride // ALIGNMENT for tensor in (keys, values) for stride in tensor.stride()[:3]]
    with torch.cuda.device(keys.device):
        launch_with_pdl(
            kernel,
            (batch * kv_heads, groups, 2),
            (STREAMS * out.head_dim // 8, 1, 1),
            [keys, values, group_index, *masking, *placing, *out.arguments, kv_heads, out.groups, *strides],
        )
