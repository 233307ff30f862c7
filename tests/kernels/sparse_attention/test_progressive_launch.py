"""What the CUDA kernels of attention to chosen tokens are launched with, without a GPU."""

import pytest
import torch

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.cuda import parts_of
from ridgeplan.kernels.selection.draft_planes import DraftPlanes
from ridgeplan.kernels.sparse_attention.cuda import (
    SparseKernel,
    SparseVariant,
    buffer_bytes,
    index_list_attention_cuda,
    most_groups,
    progressive_attention_cuda,
)

SMS = 132


VARIANT = SparseVariant(128, 4, True)
ARRIVALS = torch.zeros(16, dtype=torch.int32)
CTA_BYTES = 227 * 1024  # of an H200


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 66, 67, 132, 133, 500])
def test_ctas_of_all_rows_run_at_once(rows: int) -> None:
    """One CTA per SM, and no row could have more."""
    parts = parts_of(rows, SMS)
    assert parts == 1 or rows * parts <= SMS
    assert rows * (parts + 1) > SMS


@pytest.mark.parametrize(("rows", "least", "parts"), [(8, 16, 16), (32, 5, 8), (132, 2, 2), (1, 500, 528), (100, 3, 3)])
def test_rows_of_more_groups_than_a_turn_holds(rows: int, least: int, parts: int) -> None:
    """The fewest turns of 132 CTAs that give `least` a row, shared out."""
    assert parts_of(rows, SMS, least) == parts


def test_warps_have_two_groups_then_three_tiles() -> None:
    """2-bit keys, scales and minima; 16 tokens' keys and values, both pairs of 128, 16 places and a number."""
    stage, tile = 128 * 32 + 512, 2 * 16 * 64 + 2 * 512 + 32
    assert buffer_bytes(VARIANT) == 3 * tile > 2 * stage
    assert VARIANT.shared_bytes(100) == 16 * 4 * 4 * 128  # the results are larger


def test_a_cta_has_room_for_the_bins_of_a_row_of_131072_tokens_in_four_parts() -> None:
    """And for 3% more, as caches are longer than prompts. A thread counts a group, so 512 are the most."""
    assert most_groups(VARIANT, CTA_BYTES) >= 1.03 * 1024 / 4
    assert most_groups(SparseVariant(64, 4, True), CTA_BYTES) <= 512


@pytest.mark.parametrize(
    ("rows", "groups", "parts"),
    [(8, 1024, 16), (8, 256, 16), (8, 32, 2), (2, 32, 2), (8, 1, 1), (8, 0, 1), (128, 300, 2)],
)
def test_a_cta_that_chooses_has_a_group_for_each_warp(rows: int, groups: int, parts: int) -> None:
    """Unless its shared memory holds fewer, or as many CTAs run at once."""
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS, group_bytes=256, most_groups=270)
    assert kernel.parts(rows, groups) == parts
    assert SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS).parts(rows, groups) == max(1, SMS // rows)


def problem() -> tuple[torch.Tensor, ...]:
    """Queries within a joint projection, keys, values, begin, end, groups."""
    qkv = torch.zeros(2, 1, 48, 128, dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 2, 8, 300, 128, dtype=torch.bfloat16)
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [200, 120], [39, 7])]
    return qkv[:, :, :32], keys, values, *lengths


def test_the_launch_of_progressive_attention(launches) -> None:  # type: ignore[no-untyped-def]
    codes = QuantizedKV.allocate(2, 8, 39, 128, 128, "cpu", lower=False)
    planes = DraftPlanes.allocate(codes)
    q, keys, values, begin, end, groups = problem()
    k = torch.tensor([300, 60], dtype=torch.int32)
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS, group_bytes=256, most_groups=270)
    out = progressive_attention_cuda(kernel, q, keys, values, (begin, end, groups), codes, planes, k, 4, 0.5)
    assert out.shape == (2, 1, 32, 128)
    [(compiled, grid, threads, params, shared_bytes, early)] = launches.asked
    assert (compiled, grid, threads, shared_bytes, early) == ("compiled", (16 * 3, 1, 1), 512, 1234 + 13 * 256, True)
    assert (params.batch, params.kv_heads, params.capacity, params.group_capacity) == (2, 8, 300, 39)
    assert (params.parts, params.sinks, params.scale) == (3, 4, 0.5)
    assert (params.q_batch_stride, params.q_head_stride) == (48 * 16, 16)
    assert (params.key_batch_stride, params.key_head_stride, params.key_stride) == (8 * 300 * 16, 300 * 16, 16)
    assert params.two_bit == planes.key_two_bit.data_ptr() and params.key_codes.upper == codes.key_upper.data_ptr()
    assert params.k == k.data_ptr()
    assert (params.arrivals, params.out) == (ARRIVALS.data_ptr(), out.data_ptr())
    assert params.index is None


def test_the_launch_of_an_index_list(launches) -> None:  # type: ignore[no-untyped-def]
    codes = QuantizedKV.allocate(2, 8, 40, 128, 128, "cpu", lower=False)
    planes = DraftPlanes.allocate(codes)
    q, keys, values, *lengths = problem()
    index, count = torch.zeros(2, 1, 70, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS)
    begin, end, groups = lengths
    index_list_attention_cuda(
        kernel, q, keys, values, (begin, end, groups), index, count, codes, planes.value_rows, 16, 0.5
    )
    [(_, grid, _, params, _, _)] = launches.asked
    assert grid == (16 * 8, 1, 1)
    assert (params.sets, params.index_capacity, params.page) == (1, 70, 16)
    assert (params.index, params.count) == (index.data_ptr(), count.data_ptr())
    assert params.two_bit is None
