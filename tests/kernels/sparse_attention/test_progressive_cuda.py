"""The fused kernel of progressive attention against the reference, with queries so sharp that ties weigh nothing."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.kernels.selection.two_bit import two_bit_scores
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.sparse_attention.progressive import progressive_attention
from ridgeplan.kernels.sparse_attention.progressive_cuda import find_kernel

pytestmark = pytest.mark.gpu
SHARPNESS = 6
LSE_NOISE = 1.0  # queries rounded to 8 bits change logits, whose deviation is SHARPNESS, by 4% of it: 4 sigma


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
    lse: Tensor
    threshold: Tensor

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
        quantize(stored[0] + 2, stored[1], codes, zero)
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, zero, capacity)
        q = SHARPNESS * random(batch, 1, q_heads, head_dim)
        keys, values = random(2, batch, kv_heads, max(end) + 5, head_dim)
        ends, visible = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (end, groups))
        lse = torch.zeros(batch, q_heads, device="cuda")
        threshold = torch.full((batch, kv_heads), -torch.inf, device="cuda")
        return cls(codes, planes, q, keys, values, zero + 1, ends, visible, lse, threshold)

    def run(self, k: int, sinks: int, backend: Backend) -> Tensor:
        wanted = torch.full_like(self.groups, k)
        exact = backend == "reference"
        q, keys, values = (x.float() if exact else x for x in (self.q, self.keys, self.values))
        return progressive_attention(
            q, keys, values, self.begin, self.end, self.codes, self.planes, self.groups, wanted, self.lse,
            self.threshold, max_k=self.codes.groups * 128, sinks=sinks, backend=backend,
        )  # fmt: skip


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
def test_against_the_reference(case: Case) -> None:
    """The first call reads all tokens, the next the best; calls repeat bit by bit and leave the counters at zero."""
    problem, (k, sinks) = Problem.build(*case.sizes), case.choice
    kernel = find_kernel(problem.q, problem.keys, problem.values, problem.codes)
    assert kernel is not None
    everything = problem.run(1 << 20, sinks, "reference")
    settled = problem.lse.clone()
    assert relative_error(problem.run(k, sinks, "auto"), everything) < 2e-2
    assert torch.allclose(problem.lse, settled, atol=LSE_NOISE)
    problem.run(k, sinks, "auto")
    before = problem.lse.clone(), problem.threshold.clone()
    expected = problem.run(k, sinks, "reference")
    problem.lse.copy_(before[0])
    found = problem.run(k, sinks, "auto")
    assert torch.isfinite(found).all()
    assert relative_error(found, expected) < 2e-2
    for state, own in zip((problem.lse, problem.threshold), before, strict=True):
        state.copy_(own)
    assert torch.equal(problem.run(k, sinks, "auto"), found)
    assert not any(counter.any() for counter in kernel.counters.values())


@pytest.mark.parametrize("case", CASES[:4])
def test_the_threshold_is_the_score_of_rank_k(case: Case) -> None:
    """Of the tokens after the sinks: about k - sinks exact scores reach it. Rows without groups keep theirs."""
    problem, (k, sinks) = Problem.build(*case.sizes), case.choice
    for _ in range(2):
        problem.run(k, sinks, "auto")
    keys = TwoBitKeys.of(problem.codes, problem.planes)
    scores = two_bit_scores(problem.q, keys, problem.groups, problem.lse, backend="reference")
    for b, count in enumerate(case.sizes[1]):
        if not count:
            assert problem.threshold[b].isinf().all()
            continue
        reached = (scores[b, :, sinks : 128 * count] >= problem.threshold[b, :, None]).sum(1)
        assert ((reached - (k - sinks)).abs() <= 0.1 * k).all()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def test_all_tokens_and_none() -> None:
    """k beyond the tokens reads all of them; 0 reads the recent ones alone."""
    problem = Problem.build((32, 8, 128), (9, 4), (40, 77), torch.bfloat16)
    for k in (1 << 20, 0):
        expected = problem.run(k, 0, "reference")
        for _ in range(2):
            found = problem.run(k, 0, "auto")
        assert relative_error(found, expected) < 2e-2


def test_far_log_sum_exps_recover() -> None:
    """From zeros, or from values that are far off, a few calls come to the queries' own."""
    problem = Problem.build((32, 8, 128), (9,), (40,), torch.bfloat16)
    problem.run(100, 0, "reference")
    settled = problem.lse.clone()
    for start in (0.0, 400.0, -400.0):
        problem.lse.fill_(start)
        for _ in range(10):
            assert torch.isfinite(problem.run(100, 0, "auto")).all()
        assert torch.allclose(problem.lse, settled, atol=LSE_NOISE)


def test_chained_in_a_graph() -> None:
    """Calls back to back in a captured graph, where each may start before the last has ended."""
    problem = Problem.build((32, 8, 128), (60,), (150,), torch.bfloat16)
    expected = [problem.run(500, 4, "auto").clone() for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [problem.run(500, 4, "auto") for _ in range(8)]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(relative_error(x, expected) < 1e-2 for x in results)
