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
    counters = [torch.zeros(MAX_ROWS, width, dtype=torch.int32) for width in (BINS, 2)]
    return ProgressiveKernel("compiled", ProgressiveVariant(128, heads, True), SMS, 200 << 10, *counters)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 66, 67, 132, 133, 500])
def test_ctas_that_wait_for_each_other_are_resident(rows: int) -> None:
    """One CTA per SM; a row of one CTA waits for none."""
    parts = parts_of(rows, SMS)
    assert parts == 1 or rows * parts <= SMS
    assert rows * (parts + 1) > SMS  # and no more of them would fit


def test_scores_fit_shared_memory_or_another_kernel_runs() -> None:
    """Two bytes a token: 8 rows share 132 SMs by 16, 32 rows by 4; at 128 rows a CTA would need 256 KiB for 128k."""
    whole = kernel()
    assert whole.variant.shared_bytes(1024 // 16) == max(2 * 8192, 4 * 16 * 4 * 128)
    assert whole.fits(8, 1024) and whole.fits(32, 1024) and not whole.fits(128, 1024)
    assert not whole.fits(MAX_ROWS + 1, 1)


def test_the_launch(launches) -> None:  # type: ignore[no-untyped-def]
    codes = QuantizedKV.allocate(2, 8, 40, 128, 128, "cpu", lower=False)
    planes = DraftPlanes.allocate(codes)
    qkv = torch.zeros(2, 1, 48, 128, dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 2, 8, 300, 128, dtype=torch.bfloat16)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [200, 120], [39, 7], [300, 60])]
    lse = torch.zeros(2, 32)
    out = kernel().run(
        qkv[:, :, :32], keys, values, lengths[0], lengths[1], codes, planes, lengths[2], lengths[3], lse, 4, 0.5
    )
    assert out.shape == (2, 1, 32, 128)
    [(compiled, grid, threads, params, shared_bytes, early)] = launches.asked
    assert (compiled, grid, threads, early) == ("compiled", (16 * 8, 1, 1), 512, True)
    assert shared_bytes == 4 * 16 * 4 * 128  # more than the scores of five groups
    assert (params.batch, params.kv_heads, params.capacity, params.group_capacity) == (2, 8, 300, 40)
    assert (params.parts, params.sinks, params.scale) == (8, 4, 0.5)
    assert (params.q_batch_stride, params.q_head_stride) == (48 * 16, 16)
    assert (params.key_batch_stride, params.key_head_stride, params.key_stride) == (8 * 300 * 16, 300 * 16, 16)
    assert params.two_bit == planes.key_two_bit.data_ptr() and params.key_codes.upper == codes.key_upper.data_ptr()
    assert params.lse == lse.data_ptr() and params.out == out.data_ptr()
