"""Scores that decode attention leaves behind, against sums over queries and heads in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from attention_problem import Problem
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.attention.cuda import find_attention_kernel
from ridgeplan.kernels.attention.scores import Rows, ScoreRequest, What
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

UNTOUCHED = 77.0


CASES: list[tuple[int, int, Rows, What]] = [
    *((bits, 5, "ends", "logits") for bits in (0, 4, 8)),
    *((bits, 5, "ends", "probabilities") for bits in (0, 8)),
    (4, 1, "ends", "logits"),
    (0, 2, "last", "logits"),
    (8, 2, "all", "probabilities"),
    (4, 5, "all", "logits"),
    (8, 5, "last", "probabilities"),
    *((bits, 5, "each", "probabilities") for bits in (0, 4, 8)),
    (0, 3, "each", "logits"),
]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("bits", "queries", "rows", "what"), CASES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_scores(bits: int, queries: int, rows: Rows, what: What, backend: Backend, device: str) -> None:
    """Codes of 3 and 1 groups, or slots 2 to 30 and 0 to 9; the attention itself does not change.

    Probabilities refer to the log-sum-exps that were given, and the last query's are left.
    """
    generator = torch.Generator().manual_seed(bits + queries)
    q = torch.randn(2, queries, 6, 64, generator=generator).to(device)
    keys, values = (torch.randn(2, 2, 50, 64, generator=generator).to(device) for _ in range(2))
    begin, end, groups = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0], [31, 10], [3, 1]))
    codes = None
    if bits:
        codes = QuantizedKV.allocate(2, 2, 4, 32, 64, device, lower=bits == 8)
        store = (torch.randn(2, 2, 128, 64, generator=generator).to(device) for _ in range(2))
        quantize(*store, codes, torch.zeros_like(groups), backend="reference")
    room = 6 if rows == "each" else 1  # for more queries than the call has
    out = torch.full((2, 2, room, 130) if rows == "each" else (2, 2, 130), UNTOUCHED, device=device)
    arguments = (q, keys, values, begin, end, codes, groups if bits else None)
    sampled_lse = torch.randn(2, 6, generator=generator).to(device)
    request = ScoreRequest(out, rows, what, sampled_lse.clone())
    output = decode_attention(*arguments, lower=bits == 8, splits=3, scores=request, backend=backend)
    plain = decode_attention(*arguments, lower=bits == 8, splits=3, backend=backend)
    assert torch.equal(output, plain)
    summed = {"ends": {0, queries - 1}, "last": {queries - 1}}.get(rows, set(range(queries)))
    by_query = out if rows == "each" else out[:, :, None]
    for b in range(2):
        count = int(groups[b]) * 32 if codes is not None else 0
        recent = slice(int(begin[b]), int(end[b]) + queries - 1)
        seen = keys[b, :, recent].double()
        if codes is not None:
            seen = torch.cat([dequantize(codes, bits == 8, backend="reference")[0][b, :, :count].double(), seen], 1)
        expected = torch.zeros(2, room, seen.shape[1], dtype=torch.float64, device=device)
        lse = sampled_lse[b].double()
        for t in summed:
            logits = q[b, t].double().view(2, 3, 64) / 8 @ seen.mT
            if t == queries - 1:
                lse = logits.logsumexp(-1).flatten()
            parts = (logits - sampled_lse[b].view(2, 3, 1)).exp() if what == "probabilities" else logits
            expected[:, t if rows == "each" else 0] += parts.sum(1)
        written = slice(0, count) if codes is not None else slice(int(begin[b]), int(end[b]))
        stored = queries if rows == "each" else 1
        earlier = expected[:, :stored, : written.stop - written.start]
        assert torch.allclose(by_query[b, :, :stored, written].double(), earlier, rtol=1e-3, atol=1e-4)
        by_query[b, :, :stored, written] = UNTOUCHED
        left = lse if what == "probabilities" else sampled_lse[b].double()
        torch.testing.assert_close(request.lse[b].double(), left, rtol=1e-4, atol=1e-4)
    assert (out == UNTOUCHED).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_second_call_has_exact_probabilities(backend: Backend, device: str) -> None:
    """Of one query, those of a head add up to 1 over what it sees; a row that sees nothing leaves its log-sum-exps."""
    generator = torch.Generator().manual_seed(5)
    q, keys = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 1, 4, 32), (2, 2, 20, 32)))
    begin, end = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 5], [17, 5]))
    out, lse = (torch.zeros(shape, device=device) for shape in ((2, 2, 20), (2, 4)))
    request = ScoreRequest(out, "last", "probabilities", lse)
    for _ in range(2):
        decode_attention(q, keys, keys, begin, end, scores=request, backend=backend)
    torch.testing.assert_close(out.sum(2), torch.tensor([[2.0, 2.0], [0.0, 0.0]], device=device))
    assert (lse[1] == 0).all()


@pytest.mark.usefixtures("poisoned_empty")
def test_what_is_not_allowed() -> None:
    q, keys, length = torch.zeros(1, 2, 2, 32), torch.zeros(1, 1, 8, 32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[1, 1, 8 or more\]"):
        decode_attention(q, keys, keys, length, length, scores=ScoreRequest(torch.zeros(1, 1, 7)))
    with pytest.raises(ValueError, match=r"lse \[1, 3\] does not fit; allowed: \[1, 2\]"):
        decode_attention(
            q, keys, keys, length, length, scores=ScoreRequest(torch.zeros(1, 1, 8), lse=torch.zeros(1, 3))
        )
    with pytest.raises(ValueError, match=r"\[1, 1, 1, 8\] do not fit; allowed: \[1, 1, 2 or more, 8 or more\]"):
        request = ScoreRequest(torch.zeros(1, 1, 1, 8), "each")
        decode_attention(q, keys, keys, length, length, scores=request)
    with pytest.raises(ValueError, match=r"float32 \[B, Hkv, T, N\], not"):
        ScoreRequest(torch.zeros(1, 1, 8), "each")
    with pytest.raises(ValueError, match="need lse"):
        ScoreRequest(torch.zeros(1, 1, 8), what="probabilities")
    with pytest.raises(ValueError, match="float64"):
        ScoreRequest(torch.zeros(1, 1, 8), lse=torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="float32"):
        ScoreRequest(torch.zeros(1, 1, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="first"):
        ScoreRequest(torch.zeros(1, 1, 8), rows="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):
        ScoreRequest(torch.zeros(1, 1, 8), what="weights")  # type: ignore[arg-type]


# Scores that the CUDA kernel of decode attention leaves, against the reference in float32.

RAGGED = ((9, 0, 200), (0, 3, 17), (23, 0, 1), (2, 5, 130), (0, 4, -5))  # the last row sees nothing


@dataclass(frozen=True)
class Case:
    """Per row: visible groups, begin, end (one past the first query's own token)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int
    bits: int
    rows: Rows
    what: What
    splits: int | None = None
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[tuple[int, int, int], ...] = RAGGED

    def __str__(self) -> str:
        name = f"h{self.q_heads}/{self.kv_heads}-d{self.head_dim}-t{self.queries}-{self.bits}bit-{str(self.dtype)[6:]}"
        return f"{name}-s{self.splits or 'auto'}-{self.rows}-{self.what}"


def build(case: Case) -> Problem:
    """Random tensors, whose logits have deviations of about two; full-precision slots out of sight are NaN."""
    generator = torch.Generator("cuda").manual_seed(case.q_heads + 10 * case.queries)
    batch, capacity = len(case.lengths), max(end for _, _, end in case.lengths) + case.queries + 3
    held = max(groups for groups, _, _ in case.lengths) + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(case.dtype)

    q = 2 * random(batch, case.queries, case.q_heads, case.head_dim)
    keys, values = (random(batch, case.kv_heads, capacity, case.head_dim) for _ in range(2))
    groups, begin, end = torch.tensor(case.lengths, dtype=torch.int32, device="cuda").T.contiguous()
    for b, (_, first, length) in enumerate(case.lengths):
        for buffer in (keys, values):
            buffer[b, :, :first] = torch.nan
            buffer[b, :, max(first, length + case.queries - 1) :] = torch.nan
    if case.bits == 0:
        return Problem(q, keys, values, begin, end, None, None, False)
    codes = QuantizedKV.allocate(batch, case.kv_heads, held, 128, case.head_dim, "cuda", case.bits == 8)
    shape = (batch, case.kv_heads, held * 128, case.head_dim)
    quantize(random(*shape), random(*shape), codes, torch.zeros_like(groups), backend="reference")
    return Problem(q, keys, values, begin, end, codes, groups, case.bits == 8)


def request_for(case: Case, problem: Problem, lse: Tensor) -> ScoreRequest:
    tokens = problem.keys.shape[2] if problem.codes is None else problem.codes.groups * 128
    room = (case.queries + 1,) if case.rows == "each" else ()
    sizes = (len(problem.q), case.kv_heads, *room, tokens + 1)  # an odd width: rows of scores are aligned to nothing
    return ScoreRequest(torch.full(sizes, UNTOUCHED, device="cuda"), case.rows, case.what, lse.clone())


def relative_error(output: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(output).all()
    return float((output.double() - expected.double()).norm() / expected.double().norm())


HEADS = ((32, 8, 1), (14, 2, 1), (8, 2, 3), (9, 3, 4), (8, 2, 5), (8, 2, 8), (16, 2, 8))  # 1 to 64 query rows
CHOICES: tuple[tuple[Rows, What], ...] = (
    ("ends", "logits"), ("ends", "probabilities"), ("last", "probabilities"), ("each", "probabilities"),
)  # fmt: skip
SWEEP = [
    *(Case(*heads, 128, queries, bits, *how) for *heads, queries in HEADS for bits in (0, 4, 8) for how in CHOICES),
    *(Case(8, 2, 64, queries, bits, *how) for queries in (1, 5, 8) for bits in (0, 4, 8) for how in CHOICES[:2]),
    *(Case(8, 2, 128, 8, bits, "all", what) for bits in (0, 4, 8) for what in ("logits", "probabilities")),
    # The last row's only CTA finds its log-sum-exp itself, its last CTA does, or the kernel of the reduction.
    *(Case(8, 2, 128, 4, bits, *CHOICES[1], splits) for bits in (0, 8) for splits in (1, 3, 40)),
    *(Case(8, 2, 128, 4, bits, *how, dtype=torch.float16) for bits in (0, 4, 8) for how in CHOICES[:2]),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_cuda_scores(case: Case) -> None:
    """The reference writes the same tokens. The first call has a guess of log-sum-exps, the second the last query's."""
    problem = build(case)
    kernel = find_attention_kernel(problem.inputs)
    assert kernel is not None
    lse = 3 * torch.rand(len(problem.q), case.q_heads, device="cuda")
    request, expected = request_for(case, problem, lse), request_for(case, problem, lse)
    for _ in range(2):
        out = problem.run(case.splits, scores=request)
        problem.run(backend="reference", scores=expected)
        written = expected.out != UNTOUCHED
        assert torch.equal(written, request.out != UNTOUCHED)
        assert relative_error(request.out[written], expected.out[written]) < 1e-2
        assert request.lse is not None and expected.lse is not None
        torch.testing.assert_close(request.lse, expected.lse, rtol=0, atol=1e-2)
        expected.lse.copy_(request.lse)
    without = problem.run(case.splits)
    if kernel.occupancy.variant.warpgroup:  # which adds up in another order than the kernel with scores
        assert relative_error(out, without) < 1e-2
    else:
        assert torch.equal(out, without)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("bits", [0, 8])
def test_the_best_tokens_are_the_references(bits: int) -> None:
    """Of 8192 tokens a sixteenth is chosen; where logits nearly tie, rounding may exchange one in fifty."""
    lengths = ((64, 0, 8192 if bits == 0 else 100),)
    for what in ("logits", "probabilities"):
        case = Case(32, 8, 128, 8, bits, "ends", what, lengths=lengths)
        problem = build(case)
        request, expected = (request_for(case, problem, torch.zeros(1, 32, device="cuda")) for _ in "ab")
        for _ in range(2):
            problem.run(scores=request)
            problem.run(backend="reference", scores=expected)
        for scores, other in zip(request.out[0, :, :8192], expected.out[0, :, :8192], strict=True):
            best = set(scores.topk(512).indices.tolist()) & set(other.topk(512).indices.tolist())
            assert len(best) >= 500


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
def test_a_guess_far_off_leaves_finite_scores() -> None:
    """Log-sum-exps too small by hundreds, as of another text: the reference overflows, the kernel's weights do not."""
    case = Case(8, 2, 128, 4, 8, "ends", "probabilities", lengths=RAGGED[:1])
    problem = build(case)
    request = request_for(case, problem, torch.full((1, 8), -500.0, device="cuda"))
    problem.run(scores=request)
    assert torch.isfinite(request.out).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
def test_one_graph_serves_growing_lengths() -> None:
    """Captured once; every replay takes the log-sum-exps that the one before left."""
    case = Case(32, 8, 128, 5, 8, "ends", "probabilities", lengths=((60, 0, 200), (60, 0, 200)))
    problem = build(case)
    problem = replace(problem, keys=problem.keys.nan_to_num(), values=problem.values.nan_to_num())
    request = request_for(case, problem, torch.zeros(2, 32, device="cuda"))
    problem.run(scores=request)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run(scores=request)
    for groups, end in ((60, 200), (3, 17), (41, 1)):
        assert problem.groups is not None and request.lse is not None
        problem.groups.fill_(groups)
        problem.end.fill_(end)
        expected = request_for(case, problem, request.lse)
        request.out.fill_(UNTOUCHED)
        graph.replay()
        problem.run(backend="reference", scores=expected)
        assert (request.out[:, :, groups * 128 :] == UNTOUCHED).all()
        assert relative_error(request.out, expected.out) < 1e-2
        torch.testing.assert_close(request.lse, expected.lse, rtol=0, atol=1e-2)
