"""The fused kernel of progressive attention against the choice it documents, made by sorting exact scores.

Queries are so sharp that tokens at the edge of the choice, which rounded scores may swap, weigh nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import two_bit_scores
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import progressive_attention, sparse_decode_attention
from ridgeplan.kernels.sparse_attention.cuda import SparseKernel, find_progressive_kernel

pytestmark = pytest.mark.gpu
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
        found = find_progressive_kernel(self.q, self.keys, self.values, self.codes)
        assert found is not None
        return found

    @property
    def parts(self) -> int:
        return self.kernel.parts(self.codes.batch * self.codes.kv_heads, self.codes.groups)

    def expected(self, k: int, sinks: int = 0) -> Tensor:
        """Float32 attention to what sorting each part's scores chooses."""
        q, keys, values = (x.float() for x in (self.q, self.keys, self.values))
        scores = two_bit_scores(q, TwoBitKeys.of(self.codes, self.planes), self.groups, backend="reference")
        scores[:, :, :sinks] = torch.inf
        sets, most = scores.shape[:2], scores.shape[2]
        index = torch.zeros(*sets, most, dtype=torch.int32, device="cuda")
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
    wanted, before, chosen = min(k, 128 * groups), 0, [torch.empty(0, dtype=torch.int64, device=scores.device)]
    for part in range(min(parts, groups)):
        own = torch.arange(part, groups, parts, device=scores.device)
        share = wanted * (before + len(own)) // groups - wanted * before // groups
        before += len(own)
        tokens = (128 * own[:, None] + torch.arange(128, device=scores.device)).flatten()
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


@pytest.mark.parametrize("case", CASES)
def test_against_the_choice_by_sorting(case: Case) -> None:
    """Calls agree, repeat bit by bit and leave the counters at zero."""
    problem, (k, sinks) = Problem.build(*case.sizes), case.choice
    found = problem.run(k, sinks)
    assert torch.isfinite(found).all()
    for _ in range(3):
        assert torch.equal(problem.run(k, sinks), found)
    assert relative_error(found, problem.expected(k, sinks)) < 2e-2
    assert not problem.kernel.arrivals.any()


def assert_agrees(problem: Problem, k: int, sinks: int = 0, error: float = 2e-2) -> None:
    """The kernel's output is that of its documented choice."""
    assert relative_error(problem.run(k, sinks), problem.expected(k, sinks)) < error


def test_all_tokens_and_none() -> None:
    """k beyond the tokens reads all of them; 0 reads the recent ones alone."""
    problem = Problem.build((32, 8, 128), (9, 4), (40, 77), torch.bfloat16)
    for k in (1 << 20, 9 * 128, 0):
        assert_agrees(problem, k)


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


def test_more_groups_than_a_turn_of_ctas_holds() -> None:
    """128 rows leave each one CTA of an SM, whose bins hold fewer than 300 groups: two take turns."""
    problem = Problem.build((256, 128, 128), (300,), (10,), torch.bfloat16)
    assert problem.parts > 1
    assert_agrees(problem, 1500)


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


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
