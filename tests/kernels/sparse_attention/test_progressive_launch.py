"""What the fused kernel of progressive attention is launched with, without a GPU."""

import pytest
import torch

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.sparse_attention.progressive_cuda import (
    BINS,
    MAX_ROWS,
    ProgressiveKernel,
    ProgressiveVariant,
    parts_of,
)

SMS = 132


def kernel(heads: int = 4) -> ProgressiveKernel:
    counters = torch.zeros(MAX_ROWS, BINS, dtype=torch.int32), torch.zeros(MAX_ROWS, dtype=torch.int32)
    return ProgressiveKernel("compiled", ProgressiveVariant(128, heads, True), SMS, *counters)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 66, 67, 132, 133, 500])
def test_ctas_of_all_rows_run_at_once(rows: int) -> None:
    """One CTA per SM, and no row could have more."""
    parts = parts_of(rows, SMS)
    assert parts == 1 or rows * parts <= SMS
    assert rows * (parts + 1) > SMS


def test_the_launch(launches) -> None:  # type: ignore[no-untyped-def]
    codes = QuantizedKV.allocate(2, 8, 40, 128, 128, "cpu", lower=False)
    planes = DraftPlanes.allocate(codes)
    qkv = torch.zeros(2, 1, 48, 128, dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 2, 8, 300, 128, dtype=torch.bfloat16)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [200, 120], [39, 7], [300, 60])]
    lse, threshold = torch.zeros(2, 32), torch.zeros(2, 8)
    out = kernel().run(
        qkv[:, :, :32],
        keys,
        values,
        lengths[0],
        lengths[1],
        codes,
        planes,
        lengths[2],
        lengths[3],
        lse,
        threshold,
        4,
        0.5,
    )
    assert out.shape == (2, 1, 32, 128)
    [(compiled, grid, threads, params, shared_bytes, early)] = launches.asked
    assert (compiled, grid, threads, early) == ("compiled", (16 * 8, 1, 1), 512, True)
    assert shared_bytes == 16 * 2 * (128 * 32 + 2 * 256)  # two stages a warp: 2-bit keys, scales and minima
    assert (params.batch, params.kv_heads, params.capacity, params.group_capacity) == (2, 8, 300, 40)
    assert (params.parts, params.sinks, params.scale) == (8, 4, 0.5)
    assert (params.q_batch_stride, params.q_head_stride) == (48 * 16, 16)
    assert (params.key_batch_stride, params.key_head_stride, params.key_stride) == (8 * 300 * 16, 300 * 16, 16)
    assert params.two_bit == planes.key_two_bit.data_ptr() and params.key_codes.upper == codes.key_upper.data_ptr()
    assert (params.lse, params.threshold) == (lse.data_ptr(), threshold.data_ptr())
    assert params.out == out.data_ptr()
