"""The CUDA quantization kernel: every variant compiles for Hopper, within the registers its occupancy asks for."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.quantize_cuda import HEAD_DIMS, fits, options, source


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiles_for_hopper_without_spills(head_dim: int, planes: int, bf16: bool, tmp_path: Path) -> None:
    path = tmp_path / "quantize.cu"
    path.write_text(source(), encoding="utf-8")
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "out"), str(path)]
    done = subprocess.run([*command, *options(head_dim, planes, bf16)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores" in done.stderr


def test_cpu_tensors_are_left_to_the_reference() -> None:
    keys = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    assert not fits(keys, keys, QuantizedKV.allocate(1, 2, 1, 128, 64, "cpu", lower=True))
