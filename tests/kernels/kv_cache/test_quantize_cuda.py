"""The CUDA quantization kernel computes only what it can read; the rest is left to Triton and the reference."""

import torch

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantize_cuda import find_kernel


def test_cpu_tensors_are_left_to_the_reference() -> None:
    keys = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    assert find_kernel(keys, keys, QuantizedKV.allocate(1, 2, 1, 128, 64, "cpu", lower=True)) is None
