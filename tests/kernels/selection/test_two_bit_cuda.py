"""The CUDA kernels of the choice by 2-bit keys: exact where levels of scores lie apart, near the twin's elsewhere."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.selection import two_bit_logits, two_bit_scores, two_bit_top_k
from ridgeplan.kernels.selection.cuda import ScanVariant, TwoBitKernels, find_two_bit_kernels, two_bit_top_k_cuda
from ridgeplan.kernels.selection.draft_planes import TwoBitKeys

LEVELS = 4
ROUNDING = 0.04  # of logits' deviation: queries times scales are rounded to 8 bits
STEP = 0.13  # of a score: a bin is an eighth of a power of two
SHARPNESS = 4


class Case(NamedTuple):
    """heads: query and KV heads, and channels. groups: of each row."""

    heads: tuple[int, int, int]
    groups: tuple[int, ...]
    k: int
    sinks: int
    dtype: torch.dtype


CASES = [
    Case((32, 8, 128), (40,), 500, 4, torch.bfloat16),
    Case((32, 8, 128), (33, 7, 0, 16), 300, 0, torch.bfloat16),
    Case((14, 2, 64), (50, 3), 200, 2, torch.bfloat16),
    Case((8, 1, 128), (700,), 2000, 4, torch.float16),  # several groups ahead in every warp
    Case((9, 9, 64), (5, 1), 64, 0, torch.float16),
    Case((4, 4, 128), tuple(range(1, 41)), 100, 1, torch.bfloat16),  # more rows than SMs
    Case((32, 8, 128), (9, 4), 1 << 20, 0, torch.bfloat16),  # all tokens
    Case((32, 8, 128), (9, 4), 0, 3, torch.bfloat16),
    Case((32, 8, 128), (9, 4), 2, 5, torch.bfloat16),  # fewer than sinks
]


def queries(case: Case) -> Tensor:
    q_heads, _, head_dim = case.heads
    generator = torch.Generator("cuda").manual_seed(len(case.groups) + case.k)
    drawn = torch.randn(len(case.groups), 1, q_heads, head_dim, generator=generator, device="cuda")
    return (SHARPNESS * drawn).to(case.dtype)


def integers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def levels(case: Case) -> tuple[TwoBitKeys, Tensor]:
    """Keys all of whose codes are the token's level 0 to 3, drawn at random, [B, Hkv, tokens]; scales are alike."""
    _, kv_heads, head_dim = case.heads
    sizes = (len(case.groups), kv_heads, max(case.groups) + 1)
    drawn = torch.randint(0, LEVELS, (*sizes, 128), dtype=torch.uint8, device="cuda")
    codes = (drawn * 0x55)[..., None].expand(-1, -1, -1, -1, head_dim // 4).contiguous()
    scale = torch.full((*sizes, head_dim), 0.05, dtype=torch.float16, device="cuda")
    return TwoBitKeys(codes, scale, -7 * scale), drawn.flatten(2)


def random_keys(case: Case) -> TwoBitKeys:
    """Codes of random keys; a group's scales differ by channel."""
    _, kv_heads, head_dim = case.heads
    sizes = (len(case.groups), kv_heads, max(case.groups) + 1)
    codes = torch.randint(0, 256, (*sizes, 128, head_dim // 4), dtype=torch.uint8, device="cuda")
    scale = (0.2 + 0.1 * torch.rand(*sizes, head_dim, device="cuda")).half()
    return TwoBitKeys(codes, scale, -7 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_levels_are_chosen_from_the_top_and_ties_in_order(case: Case) -> None:
    """Positive queries: a token's rank is its level's. Calls repeat bit by bit."""
    q, (keys, level) = queries(case).abs(), levels(case)
    assert find_two_bit_kernels(q, keys) is not None
    groups, k = integers(case.groups), integers((case.k,) * len(case.groups))
    maximum = min(case.k, 128 * max(case.groups)) + 3
    index, count = two_bit_top_k(q, keys, groups, k, max_k=maximum, sinks=case.sinks)
    for b, row_groups in enumerate(case.groups):
        num_chosen = min(case.k, 128 * row_groups)
        assert count[b].tolist() == [num_chosen] * case.heads[1]
        for h in range(case.heads[1]):
            known = level[b, h, : 128 * row_groups].int()
            known[: case.sinks] = LEVELS
            best = known.sort(descending=True, stable=True).indices[:num_chosen]
            assert torch.equal(index[b, h, :num_chosen].long(), best.sort().values)
    for _ in range(3):
        again, _ = two_bit_top_k(q, keys, groups, k, max_k=maximum, sinks=case.sinks)
        valid = torch.arange(maximum, device="cuda") < count[..., None]
        assert torch.equal(again[valid], index[valid])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[:5])
def test_what_is_chosen_and_what_is_not_differ_by_rounding_only(case: Case) -> None:
    """Every chosen token's exact score is above the k-th best one less what rounding moves, and none is missing that is
    above it by more."""
    q, keys = queries(case), random_keys(case)
    groups, k = integers(case.groups), integers((case.k,) * len(case.groups))
    scores = two_bit_scores(q, keys, groups, backend="reference")
    index, count = two_bit_top_k(q, keys, groups, k, max_k=case.k)
    for b, row_groups in enumerate(case.groups):
        for h in range(case.heads[1] if row_groups else 0):
            exact, num_chosen = scores[b, h, : 128 * row_groups], int(count[b, h])
            chosen = torch.zeros_like(exact, dtype=torch.bool)
            chosen[index[b, h, :num_chosen].long()] = True
            assert int(chosen.sum()) == num_chosen == min(case.k, 128 * row_groups)
            last = exact.sort(descending=True).values[num_chosen - 1]
            moved = STEP + 6 * ROUNDING * float(exact.std())
            assert exact[chosen].min() > last - moved
            assert num_chosen == len(exact) or exact[~chosen].max() < last + moved


@pytest.mark.gpu
def test_logits_beyond_what_exp_holds() -> None:
    """Biases of keys add hundreds to logits; levels are chosen from the top all the same."""
    case = Case((32, 8, 128), (20, 11), 600, 0, torch.bfloat16)
    q, (keys, level) = queries(case).abs(), levels(case)
    moved = TwoBitKeys(keys.codes, keys.scale, keys.minimum + 10)
    logits = two_bit_logits(q, moved, 128**-0.5)[:, :, :, 0]
    assert logits.min() > 200
    index, _ = two_bit_top_k(q, moved, integers(case.groups), integers((600, 600)), max_k=600)
    for b, row_groups in enumerate(case.groups):
        for h in range(8):
            best = level[b, h, : 128 * row_groups].sort(descending=True, stable=True).indices[:600]
            assert torch.equal(index[b, h].long(), best.sort().values)


@pytest.mark.gpu
def test_chained_in_a_graph() -> None:
    """Calls back to back in a captured graph, where each may start before the last has ended."""
    case = CASES[0]
    (keys, level), q = levels(case), queries(case).abs()
    groups, k = integers(case.groups), integers((case.k,))
    expected = two_bit_top_k(q, keys, groups, k, max_k=case.k)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [two_bit_top_k(q, keys, groups, k, max_k=case.k)[0] for _ in range(8)]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in results)
    assert level[0, 0, expected[0, 0, 4:].long()].min() >= 2


# What the CUDA kernels of the choice by 2-bit keys are launched with, without a GPU.

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


@pytest.mark.parametrize("copied", [False, True])
def test_groups_that_must_be_copied_first_are_not_read_early(launches, copied: bool) -> None:  # type: ignore[no-untyped-def]
    """The scan reads them before it waits; what chooses waits first."""
    keys = TwoBitKeys.allocate(2, 8, 40, 128, 128, torch.device("cpu"))
    k = torch.full((4,), 300, dtype=torch.int32)[::2]
    groups = torch.full((4,), 40, dtype=torch.int32)[:: 2 if copied else 1][:2]
    q = torch.zeros(2, 1, 32, 128, dtype=torch.bfloat16)
    two_bit_top_k_cuda(KERNELS, q, keys, groups, k, 400, 4, 0.5)
    assert [early for *_, early in launches.asked] == [not copied, True]
