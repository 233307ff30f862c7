"""The CUDA quantization kernel computes only what it can read, and what it is launched with."""

from typing import Any

import pytest
import torch

from ridgeplan.kernels.kv_cache.cuda import QuantizeKernel, find_kernel
from ridgeplan.kernels.kv_cache.layout import QuantizedKV


def test_cpu_tensors_are_left_to_the_reference() -> None:
    keys = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    assert find_kernel(keys, keys, QuantizedKV.allocate(1, 2, 1, 128, 64, "cpu", lower=True)) is None


@pytest.mark.parametrize("placed", [False, True], ids=["whole groups", "a group from a slot"])
def test_the_launch_passes_pointers_strides_and_sizes(placed: bool, launches: Any) -> None:
    """Strides in units of 16 bytes; null pointers for what is not there."""
    keys, values = (torch.zeros(2, 384, 3, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    out = QuantizedKV.allocate(2, 3, 7, 128, 64, "cpu", lower=not placed)
    index, slots = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    mask = None if placed else torch.ones(2, dtype=torch.bool)
    QuantizeKernel("quantize").run(keys, values, out, index, mask, slots if placed else None)
    ((kernel, grid, threads, params, shared_bytes, early),) = launches.asked
    assert (kernel, grid, threads, shared_bytes, early) == ("quantize", (6, 1 if placed else 3, 2), 128, 0, True)
    assert (params.keys, params.values, params.group_index) == (keys.data_ptr(), values.data_ptr(), index.data_ptr())
    assert params.mask == (None if mask is None else mask.data_ptr())
    assert params.first_slot == (slots.data_ptr() if placed else None)
    assert params.key_codes.upper == out.key_upper.data_ptr()
    assert params.value_codes.minimum == out.value_min.data_ptr()
    assert (params.key_codes.lower is None) == placed
    assert (params.kv_heads, params.group_capacity) == (3, 7)
    strides = (params.key_batch_stride, params.key_head_stride, params.key_stride)
    assert strides == (384 * 3 * 64 // 8, 64 // 8, 3 * 64 // 8)
    assert strides == (params.value_batch_stride, params.value_head_stride, params.value_stride)
