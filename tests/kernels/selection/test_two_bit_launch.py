"""What the CUDA kernels of the choice by 2-bit keys are launched with, without a GPU."""

import pytest
import torch

from ridgeplan.kernels.selection.cuda import ScanVariant, TwoBitKernels, two_bit_top_k_cuda
from ridgeplan.kernels.selection.draft_planes import TwoBitKeys

SMS = 132
KERNELS = TwoBitKernels("scan", "choose", ScanVariant(128, 4, True), SMS)


@pytest.mark.parametrize(("batch", "groups", "parts"), [(4, 1028, 4), (1, 1028, 16), (4, 1281, 8), (2, 4, 8)])
def test_both_kernels_have_all_ctas_at_once_unless_rows_are_long(launches, batch, groups, parts) -> None:  # type: ignore[no-untyped-def]
    """8 KV heads a batch row on 132 SMs; a CTA has room for 320 groups."""
    keys = TwoBitKeys.allocate(batch, 8, groups, 128, 128, torch.device("cpu"))
    joint = torch.zeros(batch, 1, 48, 128, dtype=torch.bfloat16)
    visible, k = (torch.full((batch,), x, dtype=torch.int32) for x in (groups, 300))
    index, count = two_bit_top_k_cuda(KERNELS, joint[:, :, :32], keys, visible, k, 400, 4, 0.5)
    assert index.shape == (batch, 8, 400) and count.shape == (batch, 8)
    scanned, chosen = launches.asked
    grid = (batch * 8 * parts, 1, 1)
    stages = 16 * 2 * (128 * 32 + 512)  # two groups of each warp: 2-bit keys, scales and minima
    assert scanned[:3] == ("scan", grid, 512) and chosen[:3] == ("choose", grid, 512)
    assert (scanned[4], chosen[4]) == (stages, 0)
    params = scanned[3]
    assert params is chosen[3]
    assert (params.parts, params.group_capacity, params.kv_heads) == (parts, groups, 8)
    assert (params.sinks, params.max_k, params.scale) == (4, 400, 0.5)
    assert (params.q_batch_stride, params.q_head_stride) == (48 * 16, 16)
    assert (params.codes, params.scales, params.minima) == tuple(
        x.data_ptr() for x in (keys.codes, keys.scale, keys.minimum)
    )
    assert (params.groups, params.k) == (visible.data_ptr(), k.data_ptr())
    assert (params.index, params.count) == (index.data_ptr(), count.data_ptr())
