"""The fused kernel of progressive attention against the choice it documents, made by sorting exact scores.

Queries are so sharp that tokens at the edge of the choice, which rounded scores may swap, weigh nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import two_bit_scores
from ridgeplan.kernels.selection.cuda import parts_of
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import progressive_attention, sparse_decode_attention
from ridgeplan.kernels.sparse_attention.cuda import (
    SparseKernel,
    SparseVariant,
    buffer_bytes,
    find_index_list_kernel,
    find_progressive_kernel,
    index_list_attention_cuda,
    max_groups,
    progressive_attention_cuda,
)

SHARPNESS = 6


@dataclass
class Problem:
    """Random codes, recent tokens and a query per row; `groups` and `end` by row."""

    codes: QuantizedKV
    planes: DraftPlanes
    q: Tensor
    keys: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor
    groups: Tensor

    @classmethod
    def build(
        cls, heads: tuple[int, int, int], groups: tuple[int, ...], end: tuple[int, ...], dtype: torch.dtype
    ) -> "Problem":
        q_heads, kv_heads, head_dim = heads
        generator = torch.Generator("cuda").manual_seed(sum(groups))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        batch, capacity = len(groups), max(groups) + 1
        codes = QuantizedKV.allocate(batch, kv_heads, capacity, 128, head_dim, "cuda", lower=False)
        zero = torch.zeros(batch, dtype=torch.int32, device="cuda")
        stored = random(2, batch, kv_heads, capacity * 128, head_dim)
        quantize_coarsely(stored[0] + 2, stored[1], codes, zero)
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, zero, capacity)
        q = SHARPNESS * random(batch, 1, q_heads, head_dim)
        keys, values = random(2, batch, kv_heads, max(end) + 5, head_dim)
        ends, visible = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (end, groups))
        return cls(codes, planes, q, keys, values, zero + 1, ends, visible)

    def run(self, k: int, sinks: int = 0) -> Tensor:
        """The fused kernel's output."""
        return progressive_attention(
            self.q, self.keys, self.values, self.begin, self.end, self.codes, self.planes, self.groups,
            torch.full_like(self.groups, k), max_k=self.codes.groups * 128, sinks=sinks,
        )  # fmt: skip

    @property
    def kernel(self) -> SparseKernel:
        kernel = find_progressive_kernel(self.q, self.keys, self.values, self.codes)
        assert kernel is not None
        return kernel

    @property
    def parts(self) -> int:
        return self.kernel.parts(self.codes.batch * self.codes.kv_heads, self.codes.groups)

    def expected(self, k: int, sinks: int = 0) -> Tensor:
        """Float32 attention to what sorting each part's scores chooses."""
        q, keys, values = (x.float() for x in (self.q, self.keys, self.values))
        scores = two_bit_scores(q, TwoBitKeys.of(self.codes, self.planes), self.groups, backend="reference")
        scores[:, :, :sinks] = torch.inf
        sets, maximum = scores.shape[:2], scores.shape[2]
        index = torch.zeros(*sets, maximum, dtype=torch.int32, device="cuda")
        count = torch.zeros(sets, dtype=torch.int32, device="cuda")
        for b, groups in enumerate(self.groups.tolist()):
            for h in range(sets[1]):
                chosen = stratified_choice(scores[b, h], groups, k, sinks, self.parts)
                index[b, h, : len(chosen)] = chosen
                count[b, h] = len(chosen)
        index = index[:, :, : max(1, int(count.max()))].contiguous()
        return sparse_decode_attention(
            q, keys, values, self.begin, self.end, index, count, self.codes, self.groups, backend="reference"
        )


def quantize_coarsely(keys: Tensor, values: Tensor, codes: QuantizedKV, first: Tensor) -> None:
    """Codes of keys differ in the bits that the scan reads only, so that tokens it scores low weigh little."""
    quantize(keys, values, codes, first)
    codes.key_upper.bitwise_and_(0xCC).bitwise_or_(0x11)


def stratified_choice(scores: Tensor, groups: int, k: int, sinks: int, parts: int) -> Tensor:
    """Token numbers: each part's best of its groups g % parts == part, its share of k but all of its sinks."""
    total, before, chosen = min(k, 128 * groups), 0, [torch.empty(0, dtype=torch.int64, device=scores.device)]
    for part in range(min(parts, groups)):
        part_groups = torch.arange(part, groups, parts, device=scores.device)
        share = total * (before + len(part_groups)) // groups - total * before // groups
        before += len(part_groups)
        tokens = (128 * part_groups[:, None] + torch.arange(128, device=scores.device)).flatten()
        share = max(share, min(k, int((tokens < sinks).sum())))
        chosen.append(tokens[scores[tokens].sort(descending=True, stable=True).indices[:share]])
    return torch.cat(chosen).int()


class Case(NamedTuple):
    """sizes: heads, groups, end and dtype of a problem. choice: k and sinks."""

    sizes: tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...], torch.dtype]
    choice: tuple[int, int]


CASES = [
    Case(((32, 8, 128), (40,), (150,), torch.bfloat16), (500, 4)),
    Case(((32, 8, 128), (33, 7, 0, 16), (130, 200, 90, 1), torch.bfloat16), (300, 0)),
    Case(((14, 2, 64), (50, 3), (20, 128), torch.bfloat16), (200, 2)),
    Case(((8, 1, 128), (200,), (140,), torch.float16), (2000, 4)),
    Case(((9, 9, 64), (5, 1), (3, 3), torch.float16), (64, 0)),
    Case(((4, 4, 128), tuple(range(1, 41)), (10,) * 40, torch.bfloat16), (100, 1)),  # more rows than SMs
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_against_the_choice_by_sorting(case: Case) -> None:
    """Calls agree, repeat bit by bit and leave the counters at zero."""
    problem, (k, sinks) = Problem.build(*case.sizes), case.choice
    output = problem.run(k, sinks)
    assert torch.isfinite(output).all()
    for _ in range(3):
        assert torch.equal(problem.run(k, sinks), output)
    assert relative_error(output, problem.expected(k, sinks)) < 2e-2
    assert not problem.kernel.arrivals.any()


def assert_agrees(problem: Problem, k: int, sinks: int = 0, error: float = 2e-2) -> None:
    """The kernel's output is that of its documented choice."""
    assert relative_error(problem.run(k, sinks), problem.expected(k, sinks)) < error


@pytest.mark.gpu
def test_all_tokens_and_none() -> None:
    """k beyond the tokens reads all of them; 0 reads the recent ones alone."""
    problem = Problem.build((32, 8, 128), (9, 4), (40, 77), torch.bfloat16)
    for k in (1 << 20, 9 * 128, 0):
        assert_agrees(problem, k)


@pytest.mark.gpu
def test_ties_are_cut_in_order() -> None:
    """Keys that are all alike: output is the mean of exactly the first values of each part, in the order of tokens."""
    problem = Problem.build((32, 8, 128), (40, 17), (1, 1), torch.bfloat16)  # no recent tokens
    codes, zero = problem.codes, torch.zeros_like(problem.groups)
    alike = torch.ones(2, 8, codes.groups * 128, 128, dtype=torch.bfloat16, device="cuda")
    values = torch.randn(alike.shape, device="cuda").bfloat16()
    quantize_coarsely(alike, values, codes, zero)
    pack_draft_planes(codes, problem.planes, zero, codes.groups)
    for k, sinks in ((100, 0), (1000, 5), (1, 1)):
        assert_agrees(problem, k, sinks, 1e-2)


@pytest.mark.gpu
def test_a_mean_of_many_tokens_keeps_its_digits() -> None:
    """Values nearly cancel, and sums of codes that are not centered would lose the mean to the truncation of MMAs."""
    problem = Problem.build((4, 1, 128), (200,), (1,), torch.float16)  # no recent tokens
    problem.q.zero_()
    assert_agrees(problem, 200 * 128, error=1e-3)


@pytest.mark.gpu
def test_chosen_tokens_in_few_groups() -> None:
    """The best tokens fill three groups: some parts' share is of one group, others choose from many."""
    problem = Problem.build((32, 8, 128), (60, 31), (20, 30), torch.bfloat16)
    codes, zero = problem.codes, torch.zeros_like(problem.groups)
    stored = torch.randn(2, 2, 8, codes.groups * 128, 128, device="cuda")
    towards = problem.q[:, 0].float().unflatten(1, (8, 4)).mean(2, keepdim=True)
    stored[0, :, :, 17 * 128 : 20 * 128] += towards / 8
    quantize_coarsely(stored[0].bfloat16(), stored[1].bfloat16(), codes, zero)
    pack_draft_planes(codes, problem.planes, zero, codes.groups)
    for k in (384, 900):
        assert_agrees(problem, k)


@pytest.mark.gpu
def test_more_groups_than_a_turn_of_ctas_holds() -> None:
    """128 rows leave each one CTA of an SM, whose bins hold fewer than 300 groups: two take turns."""
    problem = Problem.build((256, 128, 128), (300,), (10,), torch.bfloat16)
    assert problem.parts > 1
    assert_agrees(problem, 1500)


@pytest.mark.gpu
def test_chained_in_a_graph() -> None:
    """Calls back to back in a captured graph, where each may start before the last has ended."""
    problem = Problem.build((32, 8, 128), (60,), (150,), torch.bfloat16)
    expected = problem.run(500, 4).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [problem.run(500, 4) for _ in range(8)]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(relative_error(x, expected) < 1e-2 for x in results)


def relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output.float() - expected).norm() / expected.norm())


# What the CUDA kernels of attention to chosen tokens are launched with, without a GPU.

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


@pytest.mark.parametrize(
    ("rows", "min_parts", "parts"), [(8, 16, 16), (32, 5, 8), (132, 2, 2), (1, 500, 528), (100, 3, 3)]
)
def test_rows_of_more_groups_than_a_turn_holds(rows: int, min_parts: int, parts: int) -> None:
    """The fewest turns of 132 CTAs that give `least` a row, shared out."""
    assert parts_of(rows, SMS, min_parts) == parts


def test_warps_have_two_groups_then_three_tiles() -> None:
    """2-bit keys, scales and minima; 16 tokens' keys and values, and both pairs of 128."""
    stage, tile = 128 * 32 + 512, 2 * 16 * 64 + 2 * 512
    assert buffer_bytes(VARIANT) == 3 * tile == 2 * stage
    assert VARIANT.shared_bytes(100) == 16 * 4 * 4 * 128  # the results are larger


def test_a_cta_has_room_for_the_bins_of_a_row_of_131072_tokens_in_four_parts() -> None:
    """And for 3% more, as caches are longer than prompts. A thread counts a group, so 512 are the most."""
    assert max_groups(VARIANT, CTA_BYTES) >= 1.03 * 1024 / 4
    assert max_groups(SparseVariant(64, 4, True), CTA_BYTES) <= 512


@pytest.mark.parametrize(
    ("rows", "groups", "parts"),
    [(8, 1024, 16), (8, 256, 16), (8, 32, 2), (2, 32, 2), (8, 1, 1), (8, 0, 1), (128, 300, 2)],
)
def test_a_cta_that_chooses_has_a_group_for_each_warp(rows: int, groups: int, parts: int) -> None:
    """Unless its shared memory holds fewer, or as many CTAs run at once."""
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS, group_bytes=256, max_groups=270)
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
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS, group_bytes=256, max_groups=270)
    inputs = AttentionInputs(q, keys, values, begin, end, codes, groups, softmax_scale=0.5)
    out = progressive_attention_cuda(kernel, inputs, planes, k, 4)
    assert out.shape == (2, 1, 32, 128)
    [(compiled, grid, threads, params, shared_bytes, early)] = launches.asked
    assert (compiled, grid, threads, shared_bytes, early) == ("compiled", (16 * 3, 1, 1), 512, 1234 + 13 * 256, True)
    assert (params.batch, params.kv_heads, params.capacity, params.group_capacity) == (2, 8, 300, 39)
    assert (params.parts, params.sinks, params.scale) == (3, 4, 0.5)
    assert (params.q_batch_stride, params.q_head_stride) == (48 * 16, 16)
    assert (params.key_batch_stride, params.key_head_stride, params.key_stride) == (8 * 300 * 16, 300 * 16, 16)
    assert params.two_bit == planes.key_two_bit.data_ptr() and params.key_codes.upper == codes.key_upper.data_ptr()
    assert params.k == k.data_ptr() and params.middles is not None
    assert (params.arrivals, params.out) == (ARRIVALS.data_ptr(), out.data_ptr())
    assert params.index is None


@pytest.mark.parametrize("copied", [False, True])
def test_groups_that_must_be_copied_first_are_not_read_early(launches, copied: bool) -> None:  # type: ignore[no-untyped-def]
    """Only groups are read before the kernel waits."""
    codes = QuantizedKV.allocate(2, 8, 39, 128, 128, "cpu", lower=False)
    q, keys, values, begin, end, groups = problem()
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS, group_bytes=256, max_groups=270)
    groups = groups.repeat_interleave(2)[::2] if copied else groups
    strided_end, k = end.repeat_interleave(2)[::2], groups
    inputs = AttentionInputs(q, keys, values, begin, strided_end, codes, groups, softmax_scale=0.5)
    progressive_attention_cuda(kernel, inputs, DraftPlanes.allocate(codes), k, 4)
    assert [early for *_, early in launches.asked] == [not copied]


def test_the_launch_of_an_index_list(launches) -> None:  # type: ignore[no-untyped-def]
    codes = QuantizedKV.allocate(2, 8, 40, 128, 128, "cpu", lower=False)
    planes = DraftPlanes.allocate(codes)
    q, keys, values, *lengths = problem()
    index, count = torch.zeros(2, 1, 70, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    kernel = SparseKernel("compiled", VARIANT, SMS, 1234, ARRIVALS)
    begin, end, groups = lengths
    inputs = AttentionInputs(q, keys, values, begin, end, codes, groups, softmax_scale=0.5)
    index_list_attention_cuda(kernel, inputs, index, count, planes.value_rows, 16)
    [(_, grid, _, params, _, _)] = launches.asked
    assert grid == (16 * 8, 1, 1)
    assert (params.sets, params.index_capacity, params.page) == (1, 70, 16)
    assert (params.index, params.count) == (index.data_ptr(), count.data_ptr())
    assert params.two_bit is None


# The CUDA kernel of attention to an index list against the reference.


def lists(batch: int, sets: int, entries: int, listed: tuple[int, ...], ordered: bool) -> tuple[Tensor, Tensor]:
    """Distinct numbers below `entries`, in ascending or any order, of which each row lists some."""
    generator = torch.Generator("cuda").manual_seed(entries)
    index = torch.rand(batch, sets, entries, generator=generator, device="cuda").argsort(-1)
    maximum = max(*listed, 1)
    index = index[:, :, :maximum].sort(-1).values if ordered else index[:, :, :maximum]
    count = torch.tensor(listed, dtype=torch.int32, device="cuda")[:, None].expand(-1, sets).contiguous()
    return index.int().contiguous(), count


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "groups", "end", "sets", "page", "listed", "ordered", "dtype"),
    [
        ((32, 8, 128), (40,), (150,), 8, 1, (500,), True, torch.bfloat16),
        ((32, 8, 128), (33, 7, 0, 16), (130, 200, 90, 1), 8, 1, (300, 896, 77, 0), False, torch.bfloat16),
        ((14, 2, 64), (50, 3), (20, 128), 1, 1, (200, 384), True, torch.float16),
        ((32, 8, 128), (40, 12), (60, 3), 8, 16, (60, 96), True, torch.bfloat16),
        ((8, 1, 128), (200,), (140,), 1, 32, (800,), False, torch.bfloat16),
        ((4, 4, 128), tuple(range(1, 41)), (10,) * 40, 4, 1, tuple(range(40)), True, torch.bfloat16),
    ],
)
def test_against_the_reference(
    heads: tuple[int, int, int],
    groups: tuple[int, ...],
    end: tuple[int, ...],
    sets: int,
    page: int,
    listed: tuple[int, ...],
    ordered: bool,
    dtype: torch.dtype,
) -> None:
    """Tokens and pages, a set per KV head or one for all, in any order; what lies beyond a row's groups is skipped."""
    q_heads, kv_heads, head_dim = heads
    batch, capacity = len(groups), max(groups) + 1
    generator = torch.Generator("cuda").manual_seed(sum(groups))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    codes = QuantizedKV.allocate(batch, kv_heads, capacity, 128, head_dim, "cuda", lower=False)
    zero = torch.zeros(batch, dtype=torch.int32, device="cuda")
    stored = random(2, batch, kv_heads, capacity * 128, head_dim)
    quantize(stored[0] + 2, stored[1], codes, zero)
    planes = DraftPlanes.allocate(codes)
    pack_draft_planes(codes, planes, zero, capacity)
    q, (keys, values) = 3 * random(batch, 1, q_heads, head_dim), random(2, batch, kv_heads, max(end) + 5, head_dim)
    ends, visible = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (end, groups))
    index, count = lists(batch, sets, max(groups) * 128 // page, listed, ordered)
    assert find_index_list_kernel(q, keys, values, codes) is not None

    def run(backend: str) -> Tensor:
        exact = backend == "reference"
        inputs = [x.float() if exact else x for x in (q, keys, values)]
        rows = None if exact else planes.value_rows
        return sparse_decode_attention(
            *inputs, zero + 1, ends, index, count, codes, visible, value_rows=rows, page=page,
            backend="reference" if exact else "auto",
        )  # fmt: skip

    expected, output = run("reference"), run("auto")
    assert float((output.float() - expected).norm() / expected.norm()) < 1e-2
    assert torch.equal(run("auto"), output)
