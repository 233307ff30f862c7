"""Decode attention, the torch reference and the Triton kernel, against a naive computation in float64."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention, merge
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import PageTable, QuantizedKV

pytestmark = pytest.mark.usefixtures("poisoned_empty")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One sweep point; per row: visible groups, begin, end (one past the first query's own token)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int
    rows: tuple[tuple[int, int, int], ...]
    bits: int
    dtype: torch.dtype = torch.float32
    group: int = 32
    splits: int | None = None

    def __str__(self) -> str:
        name = f"h{self.q_heads}/{self.kv_heads}-d{self.head_dim}-t{self.queries}-{self.bits}bit"
        return f"{name}-{str(self.dtype)[6:]}-g{self.group}-b{len(self.rows)}-s{self.splits or 'auto'}"


def build(case: Case, device: str) -> Problem:
    generator = torch.Generator().manual_seed(case.q_heads + 10 * case.queries)
    batch, capacity = len(case.rows), max(end for _, _, end in case.rows) + case.queries + 3

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    q = 2 * random(batch, case.queries, case.q_heads, case.head_dim)
    keys = random(batch, case.kv_heads, capacity, case.head_dim)
    values = random(batch, case.kv_heads, capacity, case.head_dim)
    groups, begin, end = torch.tensor(case.rows, dtype=torch.int32).to(device).unbind(1)
    for b, (_, first, row) in enumerate(case.rows):
        for buffer in (keys, values):
            buffer[b, :, :first] = torch.nan
            buffer[b, :, max(first, row + case.queries - 1) :] = torch.nan
    if case.bits == 0:
        return Problem(q, keys, values, begin.contiguous(), end.contiguous(), None, None, False)
    held = max(g for g, _, _ in case.rows) + 1
    shape = (batch, case.kv_heads, held * case.group, case.head_dim)
    lower = case.bits == 8
    codes = QuantizedKV.allocate(batch, case.kv_heads, held, case.group, case.head_dim, device, lower)
    # Keys far from zero, as biased projections make them: the minima carry most of the score.
    quantize(random(*shape) + 3, random(*shape), codes, torch.zeros_like(groups), backend="reference")
    for b, (count, _, _) in enumerate(case.rows):
        for pair in (codes.key_scale, codes.key_min, codes.value_scale, codes.value_min):
            pair[b, :, count:] = torch.nan
    return Problem(q, keys, values, begin.contiguous(), end.contiguous(), codes, groups.contiguous(), lower)


def naive(problem: Problem, sinks: Tensor | None = None, soft_cap: float = 0.0, window: int = 1 << 30) -> Tensor:
    """One query head of one query at a time, over concatenated dequantized and full-precision tokens."""
    batch, queries, q_heads, head_dim = problem.q.shape
    ratio = q_heads // problem.keys.shape[1]
    decoded = dequantize(problem.codes, problem.lower, backend="reference") if problem.codes is not None else None
    out = torch.zeros(problem.q.shape, dtype=torch.float64, device=problem.q.device)
    for b in range(batch):
        for t in range(queries):
            first = max(int(problem.begin[b]), int(problem.end[b]) + t - window)
            span = slice(first, max(first, int(problem.end[b]) + t))
            keys, values = problem.keys[b, :, span].double(), problem.values[b, :, span].double()
            if decoded is not None and problem.groups is not None and problem.codes is not None:
                count = int(problem.groups[b]) * problem.codes.group
                keys = torch.cat([decoded[0][b, :, :count].double(), keys], dim=1)
                values = torch.cat([decoded[1][b, :, :count].double(), values], dim=1)
            for head in range(q_heads if keys.shape[1] else 0):
                scores = keys[head // ratio] @ problem.q[b, t, head].double() * head_dim**-0.5
                if soft_cap:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                out[b, t, head] = scores.softmax(0)[: keys.shape[1]] @ values[head // ratio]
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - expected).norm() / expected.norm())


RAGGED = ((3, 0, 37), (1, 5, 6), (0, 2, 71))  # odd lengths, a first token, no quantized group
SWEEP = [
    *(Case(2 * ratio, 2, 64, 3, RAGGED[:2], 4) for ratio in (1, 3, 7, 8)),
    *(Case(2, 1, 64, queries, RAGGED[1:], 8) for queries in (1, 2, 5, 8, 16)),
    *(Case(4, 1, 128, 2, RAGGED, bits, group=64) for bits in (0, 4, 8)),
    *(Case(6, 2, 64, 1, RAGGED, 0, splits=splits) for splits in (1, 5, 40)),
    *(Case(3, 1, 128, 4, RAGGED, 8, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(Case(4, 2, 64, 4, RAGGED, 4, dtype, group=128) for dtype in (torch.bfloat16, torch.float16)),
    Case(4, 1, 64, 2, RAGGED, 0, torch.bfloat16, splits=3),
    Case(8, 1, 64, 16, ((2, 0, 9),), 4, torch.bfloat16, splits=2),  # 128 rows: the widest tile
    Case(12, 1, 32, 16, ((1, 0, 9),), 8, splits=2),  # 192 rows: two tiles
    *(Case(8, 1, 512, 3, RAGGED[:2], bits, torch.bfloat16, group=64, splits=2) for bits in (0, 8)),  # parts of groups
    Case(8, 1, 512, 1, RAGGED[:2], 4, group=32, splits=3),
]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_against_naive(case: Case, backend: str, device: str) -> None:
    problem = build(case, device)
    out = problem.run(case.splits, backend)
    assert out.dtype == case.dtype and out.shape == problem.q.shape
    assert relative_error(out, naive(problem)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sinks_soft_caps_and_windows_against_naive(backend: Backend, device: str) -> None:
    sinks = torch.tensor([3.0, -1.0, 0.5, 8.0], device=device)
    for bits in (0, 4):
        problem = build(Case(4, 2, 64, 3, RAGGED, bits, splits=2), device)
        options: dict[str, Any] = {"sinks": sinks, "soft_cap": 2.0, **({"window": 4} if bits == 0 else {})}
        out = problem.run(2, backend, **options)
        assert relative_error(out, naive(problem, **options)) < 1e-5


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_that_see_nothing_are_zero(backend: str, bits: int, device: str) -> None:
    """An empty row, a row whose queries see 0, 1 and 2 tokens, and a row with quantized groups alone."""
    rows = ((0, 4, 4), (0, 0, 0), (bits // 4, 6, 4))
    problem = build(Case(4, 2, 32, 3, rows, bits), device)
    empty = replace(problem, end=problem.end - torch.tensor([3, 0, 0], device=device).int())
    out = empty.run(2, backend)
    assert (out[0] == 0).all() and (out[1, 0] == 0).all() and (out[1, 1] != 0).all()
    assert relative_error(out, naive(empty)) < 1e-5


@pytest.mark.parametrize("lower", [False, True])
def test_upper_and_lower_read_different_planes(lower: bool, device: str) -> None:
    """A draft never touches the lower plane: corrupting it changes INT8 only."""
    problem = build(Case(2, 1, 32, 1, ((2, 0, 3),), 8), device)
    problem = replace(problem, lower=lower)
    before = problem.run(2, "triton")
    assert problem.codes is not None and problem.codes.key_lower is not None
    problem.codes.key_lower.bitwise_not_()
    assert torch.equal(before, problem.run(2, "triton")) != lower


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_strided_buffers(backend: str, device: str) -> None:
    """Token-major storage and fused QKV views need no copy."""
    case = Case(4, 2, 32, 2, ((0, 1, 20), (0, 0, 33)), 0)
    problem = build(case, device)
    qkv = torch.full((2, 2, 8, 32), torch.nan, device=device)
    qkv[:, :, :4] = problem.q
    strided = replace(
        problem,
        q=qkv[:, :, :4],
        keys=problem.keys.transpose(1, 2).contiguous().transpose(1, 2),
        values=torch.stack([problem.values, problem.values], dim=3)[:, :, :, 0],
    )
    assert relative_error(strided.run(2, backend), naive(problem)) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_scale_and_full_precision_dtype(backend: str, device: str) -> None:
    """An explicit scale multiplies scores; the KV buffer may be narrower than the queries."""
    problem = build(Case(2, 2, 64, 1, ((0, 0, 50),), 0), device)
    default = problem.run(backend=backend)
    window = (problem.keys, problem.values, problem.begin, problem.end)
    out = decode_attention(problem.q / 2, *window, scale=2 * 64**-0.5, backend=backend)
    assert relative_error(out, default.double()) < 1e-6
    narrow = replace(problem, keys=problem.keys.bfloat16(), values=problem.values.bfloat16())
    assert relative_error(narrow.run(backend=backend), naive(narrow)) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_large_scores_do_not_overflow(backend: str, device: str) -> None:
    problem = build(Case(2, 1, 32, 2, ((2, 0, 40),), 8), device)
    hot = replace(problem, q=problem.q * 300)
    assert relative_error(hot.run(3, backend), naive(hot)) < 1e-2


def test_splits_are_merged_by_exact_log_sum_exps(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Natural logarithms of sums of exponentials, to float32's accuracy; scores of some dozens."""
    merged = []

    def keep(partial: Tensor, lse: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        merged.append(lse)
        return merge(partial, lse, dtype, **options)

    monkeypatch.setattr("ridgeplan.kernels.attention.triton.merge", keep)
    problem = build(Case(2, 1, 64, 1, ((0, 0, 50),), 0), device)
    hot = replace(problem, q=8 * problem.q)
    hot.run(1, "triton")
    scores = hot.keys[0, 0, :50].double() @ hot.q[0, 0].double().T / 8
    torch.testing.assert_close(merged[0][0, 0, :, 0].double(), scores.logsumexp(0), atol=0, rtol=1e-6)


def test_errors_name_the_value(device: str) -> None:
    problem = build(Case(2, 1, 32, 1, ((1, 0, 3),), 4), device)
    with pytest.raises(ValueError, match="upper plane only"):
        replace(problem, lower=True).run()
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 KV heads"):
        build(Case(3, 2, 32, 1, ((0, 0, 3),), 0), device).run()
    with pytest.raises(ValueError, match="give both or neither"):
        replace(problem, groups=None).run()
    two_heads = build(Case(2, 2, 32, 1, ((1, 0, 3),), 4), device)
    with pytest.raises(ValueError, match="do not fit"):
        replace(problem, codes=two_heads.codes).run()
    with pytest.raises(ValueError, match="head_dim 48 does not fit the Triton kernel"):
        build(Case(2, 1, 48, 1, ((0, 0, 3),), 0), device).run(1, "triton")
    with pytest.raises(ValueError, match="must have one shape"):
        replace(problem, values=problem.values[:, :, 1:]).run()
    with pytest.raises(ValueError, match="disagree in batch or head_dim"):
        replace(problem, q=problem.q[..., :16]).run()
    with pytest.raises(ValueError, match="contiguous channels"):
        replace(problem, q=problem.q.repeat_interleave(2, dim=-1)[..., ::2]).run(1, "triton")


@pytest.mark.parametrize("name", ["begin", "end", "groups"])
def test_lengths_of_other_types_are_refused(name: str, device: str) -> None:
    """The CUDA kernel would read their bytes as int32."""
    problem = build(Case(2, 1, 32, 1, ((1, 0, 3),), 4), device)
    lengths = getattr(problem, name)
    with pytest.raises(ValueError, match=rf"{name} is torch.int64 \[1\] on \w+; allowed: torch.int32 \[1\]"):
        replace(problem, **{name: lengths.long()}).run()
    with pytest.raises(ValueError, match=rf"{name} is torch.int32 \[2\] on \w+; allowed"):
        replace(problem, **{name: lengths.repeat(2)}).run()


GPU_CASES = (
    [
        Case(32, 8, 128, queries, ((64, 0, 200), (37, 0, 131)), bits, torch.bfloat16, group=128)
        for queries, bits in ((1, 4), (8, 4), (1, 8), (8, 8))
    ]
    + [Case(32, 8, 128, queries, ((0, 0, 8192), (0, 3, 5001)), 0, torch.bfloat16) for queries in (1, 8)]
    + [Case(14, 2, 64, 5, ((64, 0, 200),), 8, torch.bfloat16, group=128)]
    + [Case(32, 4, 512, 4, ((40, 0, 200), (0, 0, 71)), bits, torch.bfloat16, group=128) for bits in (0, 4, 8)]
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_compiled_at_real_size(case: Case) -> None:
    """8k tokens in bf16 against the (dequantized) reference, with the split count of this GPU."""
    problem = build(case, "cuda")
    assert relative_error(problem.run(backend="triton"), naive(problem)) < 1e-2


@pytest.mark.gpu
def test_one_graph_serves_growing_lengths() -> None:
    """Captured once, replayed with other lengths in the same device tensors: no host synchronization."""
    case = Case(32, 8, 128, 2, ((60, 0, 200),), 8, torch.bfloat16, group=128)
    problem = build(case, "cuda")
    assert problem.groups is not None
    problem.run(backend="triton")  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.run(backend="triton")
    for groups, end in ((60, 200), (3, 17), (0, 1)):
        problem.groups.fill_(groups)
        problem.end.fill_(end)
        graph.replay()
        assert relative_error(out, naive(problem)) < 1e-2


# The log-sum-exp merge against softmax over everything at once.


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [(1, torch.bfloat16), (3, torch.float32), (16, torch.bfloat16), (17, torch.float32), (40, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_merge_equals_unsplit_softmax(backend: str, splits: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(splits)
    scores = 5 * torch.randn(2, 3, 2, splits, 4, generator=generator)
    values = torch.randn(splits, 4, 64, generator=generator)
    partial = torch.einsum("bthsk,skd->bthsd", scores.softmax(-1), values)
    expected = torch.einsum("bthn,nd->bthd", scores.flatten(-2).softmax(-1), values.flatten(0, 1))
    out = merge(partial.to(device), scores.logsumexp(-1).to(device), dtype, backend=backend)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_empty_splits_are_never_read(backend: str, device: str) -> None:
    partial = torch.full((2, 1, 1, 5, 32), torch.nan, device=device)
    lse = torch.full((2, 1, 1, 5), -torch.inf, device=device)
    partial[0, :, :, 1], lse[0, :, :, 1] = 2.0, -300.0
    partial[0, :, :, 4], lse[0, :, :, 4] = 4.0, -300.0
    out = merge(partial, lse, torch.float32, backend=backend)
    torch.testing.assert_close(out[0], torch.full_like(out[0], 3.0))
    assert (out[1] == 0).all()


def in_pages(problem: Problem) -> Problem:
    """The same codes with a page per group in a random order, buffers in reverse order, and a strided table."""
    codes, batch = problem.codes, len(problem.q)
    assert codes is not None
    order = torch.randperm(batch * codes.groups, generator=torch.Generator().manual_seed(5)).to(problem.q.device)
    paged = []
    for field in fields(codes):
        plane = getattr(codes, field.name)
        if plane is not None:
            by_group = plane.transpose(1, 2).flatten(0, 1)
            plane = torch.empty_like(by_group)
            plane[order] = by_group
            plane = plane[:, :, None].contiguous()
        paged.append(plane)
    table = torch.full((batch, codes.groups + 3), -1, dtype=torch.int32, device=problem.q.device)
    table[:, : codes.groups] = order.view(batch, codes.groups)
    buffers = torch.arange(batch, dtype=torch.int32, device=problem.q.device).flip(0) + 1
    spare = torch.full_like(problem.keys[:1], torch.nan)
    keys, values = (torch.cat([spare, full.flip(0)]) for full in (problem.keys, problem.values))
    pages = PageTable(table[:, : codes.groups], buffers)
    return replace(problem, keys=keys, values=values, codes=QuantizedKV(*paged), pages=pages)


@pytest.mark.parametrize(("bits", "backend"), [(4, "reference"), (8, "reference"), (8, "triton")])
def test_pages_change_nothing(bits: int, backend: Backend, device: str) -> None:
    problem = build(Case(4, 2, 32, 2, RAGGED, bits, splits=3), device)
    torch.testing.assert_close(in_pages(problem).run(3, backend), problem.run(3, backend), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("bits", [4, 8])
def test_cuda_reads_pages(bits: int, queries: int, head_dim: int) -> None:
    rows = ((40, 0, 100), (1, 5, 6), (0, 2, 71), (301, 0, 1))
    problem = build(Case(8, 2, head_dim, queries, rows, bits, torch.bfloat16, group=128), "cuda")
    torch.testing.assert_close(in_pages(problem).run(), problem.run(), rtol=0, atol=0)


def test_what_a_paged_cache_refuses() -> None:
    problem = in_pages(build(Case(2, 1, 64, 1, RAGGED, 8), "cpu"))
    assert problem.pages is not None and problem.codes is not None
    with pytest.raises(ValueError, match=r"pages is torch.int64 \[3, 4\]; allowed: packed int32"):
        PageTable(problem.pages.pages.long(), problem.pages.buffers)
    with pytest.raises(ValueError, match="pages of 3 sequences and buffers of 2"):
        PageTable(problem.pages.pages, problem.pages.buffers[:2])
    with pytest.raises(ValueError, match="one group per row"):
        replace(problem, codes=problem.codes.gathered(problem.pages.pages[0])).run()
    with pytest.raises(ValueError, match="scores: allowed without pages"):
        problem.run(scores=ScoreRequest(torch.zeros(3, 1, 128), "last"))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_out_is_written_and_returned(backend: Backend, device: str) -> None:
    problem = build(Case(4, 2, 32, 2, ((2, 0, 9), (1, 3, 12)), 8), device)
    given = torch.full_like(problem.q, torch.nan)
    out = problem.run(backend=backend, out=given)
    assert out is given
    torch.testing.assert_close(out, problem.run(backend=backend))
    for wrong in (given[:1], given.double(), given.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ValueError, match=r"out is torch.* allowed: torch.float32 \[2, 2, 4, 32\], contiguous"):
            problem.run(backend=backend, out=wrong)
