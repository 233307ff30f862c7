"""Attention to chosen tokens and pages, against softmax over the chosen tokens in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.attention import decode_attention
from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.token_rows import TokenRows, pack_token_rows
from ridgeplan.kernels.selection import two_bit_scores
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import progressive_attention, sparse_decode_attention
from ridgeplan.kernels.sparse_attention.reference import attend_masked

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
BEGIN, END, GROUPS = (3, 40), (30, 44), (4, 2)  # of two batch rows


@dataclass(frozen=True)
class Case:
    """A sweep point: bits 0 for slots, 4 or 8 for codes; rows: values are read from token-major rows."""

    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int
    bits: int
    page: int = 1
    sets: int = 0  # 1: one set for all heads; 0: one per KV head
    rows: bool = False
    splits: int | None = None
    dtype: torch.dtype = torch.float32
    group: int = 32

    def __str__(self) -> str:
        read = f"{self.bits}bit{'-rows' if self.rows else ''}-page{self.page}-sets{self.sets or self.kv_heads}"
        return f"h{self.q_heads}/{self.kv_heads}-d{self.head_dim}-t{self.queries}-{read}-s{self.splits}-{self.dtype}"


@dataclass(frozen=True)
class Problem:
    """The tensors of a case; `tokens[b][h]` are the chosen tokens that exist."""

    case: Case
    q: Tensor
    keys: Tensor
    values: Tensor
    begin: Tensor
    end: Tensor
    index: Tensor
    count: Tensor
    codes: QuantizedKV | None
    groups: Tensor | None
    value_rows: Tensor | None
    tokens: list[list[list[int]]]

    def run(self, backend: Backend) -> Tensor:
        return sparse_decode_attention(
            self.q, self.keys, self.values, self.begin, self.end, self.index, self.count, self.codes, self.groups,
            value_rows=self.value_rows, page=self.case.page, lower=self.case.bits == 8, splits=self.case.splits,
            backend=backend,
        )  # fmt: skip


def build(case: Case, device: str) -> Problem:
    generator = torch.Generator().manual_seed(case.q_heads + 10 * case.queries + case.page)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    q = 2 * random(2, case.queries, case.q_heads, case.head_dim)
    keys, values = (random(2, case.kv_heads, 60, case.head_dim) for _ in range(2))
    begin, end, groups = (torch.tensor(x, dtype=torch.int32, device=device) for x in (BEGIN, END, GROUPS))
    codes = planes = None
    if case.bits:
        codes = QuantizedKV.allocate(2, case.kv_heads, 4, case.group, case.head_dim, device, case.bits == 8)
        shape = (2, case.kv_heads, 4 * case.group, case.head_dim)
        quantize(random(*shape) + 3, random(*shape), codes, torch.zeros_like(groups), backend="reference")
        planes = DraftPlanes.allocate(codes)
        pack_draft_planes(codes, planes, torch.zeros_like(groups), 4, backend="reference")
    for b in range(2):  # what no query may read is NaN
        keys[b, :, END[b] + case.queries - 1 :] = values[b, :, END[b] + case.queries - 1 :] = torch.nan
        if codes is not None:
            codes.key_scale[b, :, GROUPS[b] :] = codes.value_scale[b, :, GROUPS[b] :] = torch.nan
    limits = [g * case.group for g in GROUPS] if case.bits else list(BEGIN)
    sets = case.sets or case.kv_heads
    pages = -(-max(4 * case.group if case.bits else 0, 60) // case.page)
    index = torch.stack([torch.randperm(pages, generator=generator) for _ in range(2 * sets)])
    index = index[:, : 3 * pages // 4].int().view(2, sets, -1).to(device)
    count = torch.tensor([[index.shape[2] - 2] * sets, list(range(sets))], dtype=torch.int32, device=device)
    tokens = [
        [
            [
                page * case.page + i
                for page in index[b, h % sets, : int(count[b, h % sets])].tolist()
                for i in range(case.page)
                if page * case.page + i < limits[b]
            ]
            for h in range(case.kv_heads)
        ]
        for b in range(2)
    ]
    rows = planes.value_rows if planes is not None and case.rows else None
    return Problem(
        case, q, keys, values, begin, end, index, count, codes, None if codes is None else groups, rows, tokens
    )


def naive(problem: Problem) -> Tensor:
    """One query head of one query at a time."""
    case, out = problem.case, torch.zeros(problem.q.shape, dtype=torch.float64, device=problem.q.device)
    earlier = problem.keys, problem.values
    if problem.codes is not None:
        earlier = dequantize(problem.codes, case.bits == 8, backend="reference")
    for b in range(2):
        for head in range(case.q_heads):
            h = head // (case.q_heads // case.kv_heads)
            chosen = problem.tokens[b][h]
            for t in range(case.queries):
                recent = slice(BEGIN[b], END[b] + t)
                keys, values = (
                    torch.cat([old[b, h, chosen].double(), new[b, h, recent].double()])
                    for old, new in zip(earlier, (problem.keys, problem.values), strict=True)
                )
                scores = keys @ problem.q[b, t, head].double() * case.head_dim**-0.5
                out[b, t, head] = scores.softmax(0) @ values
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - expected).norm() / expected.norm())


SWEEP = [
    *(Case(2 * ratio, 2, 64, 1, bits) for ratio, bits in ((1, 4), (4, 0), (7, 0), (7, 4))),
    *(Case(4, 2, 64, 1, 4, rows=True, splits=splits) for splits in (1, 3, 9)),
    *(Case(4, 2, 128, queries, bits, group=64) for queries, bits in ((1, 8), (5, 0), (5, 4), (5, 8))),
    *(Case(4, 2, 64, 1, bits, page=page) for page, bits in ((4, 0), (4, 8), (16, 0), (16, 4), (32, 4), (32, 8))),
    *(Case(4, 2, 64, 2, bits, page=page, sets=1) for page, bits in ((1, 4), (8, 0), (8, 4))),
    *(Case(4, 2, 64, 2, bits, rows=bits == 4, dtype=torch.bfloat16) for bits in (0, 4, 8)),
    Case(8, 1, 64, 16, 4, page=16, rows=True),
]


@BACKENDS
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_against_naive(case: Case, backend: Backend, device: str) -> None:
    problem = build(case, device)
    out = problem.run(backend)
    assert out.dtype == case.dtype and out.shape == problem.q.shape
    assert relative_error(out, naive(problem)) < TOLERANCE[case.dtype]


@BACKENDS
@pytest.mark.parametrize(("bits", "page"), [(4, 1), (8, 1), (4, 16)])
def test_all_tokens_chosen_is_decode_attention(bits: int, page: int, backend: Backend, device: str) -> None:
    problem = build(Case(4, 2, 64, 3, bits, page), device)
    every = torch.arange(128 // page, dtype=torch.int32, device=device).expand(2, 2, -1).contiguous()
    full = replace(problem, index=every, count=torch.full_like(problem.count, 128 // page))
    expected = decode_attention(
        problem.q, problem.keys, problem.values, problem.begin, problem.end, problem.codes, problem.groups,
        lower=bits == 8, backend="reference",
    )  # fmt: skip
    assert relative_error(full.run(backend), expected.double()) < 1e-5


@BACKENDS
def test_nothing_chosen_is_the_recent_tokens(backend: Backend, device: str) -> None:
    problem = build(Case(4, 2, 64, 3, 4), device)
    none = replace(problem, count=torch.zeros_like(problem.count))
    expected = decode_attention(
        problem.q, problem.keys, problem.values, problem.begin, problem.end, backend="reference"
    )
    assert relative_error(none.run(backend), expected.double()) < 1e-5


@BACKENDS
def test_rows_that_see_nothing_are_zero(backend: Backend, device: str) -> None:
    problem = build(Case(4, 2, 64, 1, 4), device)
    none = replace(problem, count=torch.zeros_like(problem.count), end=problem.begin)
    assert not none.run(backend).any()


def test_what_is_not_allowed(device: str) -> None:
    problem = build(Case(4, 2, 64, 1, 8), device)
    with pytest.raises(ValueError, match="allowed: int32"):
        replace(problem, index=problem.index.long()).run("reference")
    with pytest.raises(ValueError, match="count"):
        replace(problem, count=problem.count[:, :1]).run("reference")
    with pytest.raises(ValueError, match="divide the group"):
        replace(problem, case=replace(problem.case, page=24)).run("reference")
    with pytest.raises(ValueError, match="lower=False"):
        replace(problem, value_rows=problem.codes.key_upper).run("reference")  # type: ignore[union-attr]


# Progressive attention reads what its own 2-bit scores rank first, and nothing else of the codes.


@pytest.mark.parametrize(("sinks", "k"), [(0, 5), (3, 5), (0, 0), (2, 200)])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_progressive(sinks: int, k: int, backend: Backend, device: str) -> None:
    """Equal to attention over the tokens that a sort of the scores, with the sinks before all, puts first."""
    generator = torch.Generator().manual_seed(3)
    codes = QuantizedKV.allocate(2, 2, 4, 32, 64, device, lower=False)
    shape = (2, 2, 128, 64)
    old = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
    zero = torch.zeros(2, dtype=torch.int32, device=device)
    quantize(*old, codes, zero, backend="reference")
    planes = DraftPlanes.allocate(codes)
    pack_draft_planes(codes, planes, zero, 4, backend="reference")
    q = 3 * torch.randn(2, 1, 8, 64, generator=generator).to(device)
    keys, values = (torch.randn(2, 2, 20, 64, generator=generator).to(device) for _ in range(2))
    groups, end = zero + torch.tensor([4, 1], device=device).int(), zero + 11
    scores = two_bit_scores(q, TwoBitKeys.of(codes, planes), groups, backend="reference")
    index = torch.zeros(2, 2, 128, dtype=torch.int32, device=device)
    for b, tokens in enumerate((128, 32)):
        for h in range(2):
            ranked = sorted(range(tokens), key=lambda n: (n >= sinks, -float(scores[b, h, n])))
            index[b, h, : min(k, tokens)] = torch.tensor(ranked[:k], dtype=torch.int32)
    count = torch.tensor([[min(k, 128)] * 2, [min(k, 32)] * 2], dtype=torch.int32, device=device)
    expected = sparse_decode_attention(q, keys, values, zero, end, index, count, codes, groups, backend="reference")
    out = progressive_attention(
        q, keys, values, zero, end, codes, planes, groups, zero + k, max_k=128, sinks=sinks,
        backend=backend,
    )  # fmt: skip
    assert torch.allclose(out, expected, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("page, sets", [(1, 1), (1, 0), (16, 0)])
@pytest.mark.parametrize("queries", [1, 3])
def test_codes_that_lie_in_slots_are_read_as_those_in_the_order_of_the_text(backend, page, sets, queries, device):
    """Each chosen page's rows lie in some slot; rows of all other slots are NaN."""
    problem = build(Case(4, 2, 32, queries, 8, page=page, sets=sets), device)
    rows = pack_token_rows(problem.codes)
    pages = problem.codes.groups * problem.case.group // page
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(pages, generator=generator) for _ in range(2 * problem.index.shape[1])])
    order = order.int().view(2, -1, pages).to(device)  # the slot of each page
    held = [torch.full_like(each, -1) for each in rows]
    for b in range(2):
        for h in range(2):
            unit_set = h % order.shape[1]
            for number in problem.index[b, unit_set, : int(problem.count[b, unit_set])].tolist():
                slot = int(order[b, unit_set, number])
                for slots, source in zip(held, rows, strict=True):
                    part = source[b, h, number * page : (number + 1) * page]
                    slots[b, h, slot * page : (slot + 1) * page] = part
    codes = TokenRows(*held, problem.codes.key_scale, problem.codes.key_min, problem.case.group)
    inside = problem.index.clamp_max(pages - 1)
    slots = order.gather(2, inside.long())
    arguments = problem.q, problem.keys, problem.values, problem.begin, problem.end, inside, problem.count
    options = {"page": page, "lower": True, "backend": backend}
    out = sparse_decode_attention(*arguments, codes, problem.groups, slots=slots, **options)
    assert relative_error(out, naive(problem)) < 1e-5
    assert torch.equal(out, sparse_decode_attention(*arguments, problem.codes, problem.groups, **options))
    with pytest.raises(ValueError, match="TokenRows: give both"):
        sparse_decode_attention(*arguments, codes, problem.groups, **options)


def test_what_no_query_sees_may_be_nan() -> None:
    q, keys, values = torch.ones(2, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4)
    keys[:, 1] = values[:, 1] = torch.nan
    visible = torch.tensor([[[True, False, True], [False, False, False]]])
    assert attend_masked(q, keys, values, visible).tolist() == [[[1.0] * 4] * 2, [[0.0] * 4] * 2]
