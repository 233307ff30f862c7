"""CUDA kernel of decode attention: its schedule of shared memory anywhere, its results on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_problem import Problem
from torch import Tensor

from ridgeplan.kernels.attention import cuda
from ridgeplan.kernels.attention.cuda import (
    MAX_STAGES,
    MERGE_PARTS,
    MIN_CTAS_PER_SM,
    MIN_TILES_PER_CTA,
    RESERVED_BYTES,
    WGMMA_CTAS_PER_SM,
    AttentionKernel,
    AttentionVariant,
    Occupancy,
    find_attention_kernel,
    fuses_reduction,
    merge_parts,
)
from ridgeplan.kernels.attention.inputs import AttentionInputs
from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline import ops

HOPPER_BYTES = 228 * 1024  # shared memory of an SM
HOPPER_SMS = 132
MERGES = {parts: f"merge of {parts}" for parts in MERGE_PARTS}
VARIANTS = [
    AttentionVariant(d, bits, True, rows) for d in (64, 128) for bits in (0, 4, 8) for rows in (8, 16, 24, 32, 64)
]
VARIANTS += [
    replace(variant, warpgroup=True) for variant in VARIANTS if variant.bits and variant.rows in WGMMA_CTAS_PER_SM
]


def hopper(variant: AttentionVariant) -> Occupancy:
    return Occupancy(variant, HOPPER_SMS, HOPPER_BYTES)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_ctas_fit_an_sm(variant: AttentionVariant) -> None:
    """On Hopper every variant has the stages it needs."""
    occupancy = hopper(variant)
    assert occupancy.fits
    cta_bytes = occupancy.shared_bytes + variant.static_bytes(occupancy.stages) + RESERVED_BYTES
    assert variant.ctas_per_sm * cta_bytes <= HOPPER_BYTES


def test_smaller_sms_run_what_fits_them() -> None:
    """Of 100 KB three CTAs have 33.3 each, of which 16 query rows of 128 channels take 8 and the rest 1.3:
    room for one stage of INT8 (16.5 KB) but for two of INT4 (8.5 KB)."""
    sm_bytes = 100 * 1024
    fitting = {
        (variant.head_dim, variant.bits)
        for variant in VARIANTS
        if variant.rows == 16 and Occupancy(variant, 170, sm_bytes).fits
    }
    assert fitting == {(64, 0), (64, 4), (64, 8), (128, 0), (128, 4)}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_short_rows_have_fewer_ctas_that_leave_room_for_at_most_three(variant: AttentionVariant) -> None:
    occupancy, most = hopper(variant), variant.ctas_per_sm
    shared_bytes = occupancy.shared_bytes
    enough = HOPPER_SMS * most * MIN_TILES_PER_CTA
    assert occupancy.residency(enough) == (HOPPER_SMS * most, shared_bytes)
    resident, padded_bytes = occupancy.residency(enough - 1)
    sharing = min(most, MIN_CTAS_PER_SM)
    assert resident == HOPPER_SMS * max(most - 1, 1 if variant.bits else sharing)
    assert occupancy.residency(1) == (HOPPER_SMS * (1 if variant.bits else sharing), padded_bytes)
    if sharing == most:
        assert padded_bytes == shared_bytes
    else:
        assert padded_bytes >= shared_bytes
        assert HOPPER_BYTES // (padded_bytes + RESERVED_BYTES) == sharing
        assert sharing * (padded_bytes + variant.static_bytes(MAX_STAGES) + RESERVED_BYTES) <= HOPPER_BYTES


def test_shared_memory_holds_stages_queries_and_probabilities() -> None:
    """By hand, for 8 query rows of 128 channels and INT4: 32 tokens a dense tile, probabilities of 128 tokens, fp16."""
    variant = AttentionVariant(128, 4, True, 8)
    assert variant.stage_bytes == 32 * 128 * 2 + 512
    assert variant.shared_bytes(3) == 3 * variant.stage_bytes + 8 * 128 * 2 + 8 * 128 * 2


def test_grids_divide_rows_evenly_if_that_leaves_few_sms_idle() -> None:
    """Of 528 CTAs: 8 rows take 66 each; 500 rows one each, as 28 idle ones are few; 300 rows would leave 228 idle."""
    occupancy = hopper(AttentionVariant(128, 4, True, 8))
    ctas = {kv_rows: occupancy.grid(kv_rows, 2112)[0] for kv_rows in (1, 8, 500, 300, 5000)}
    assert ctas == {1: 528, 8: 528, 500: 500, 300: 528, 5000: 528}


def test_reductions_of_few_elements_and_rows_are_fused() -> None:
    """By one CTA up to 16384 elements of partials; rows as far as there are 4096 counters."""
    assert fuses_reduction(32, 1, 512)
    assert not fuses_reduction(33, 1, 512)
    assert fuses_reduction(4096, 4096, 512)
    assert not fuses_reduction(4097, 4097, 512)


def test_more_splits_are_merged_by_more_groups_of_threads() -> None:
    """A group has eight splits in flight; of 7 CTAs per row one more may belong to its neighbour. At most 16 groups."""
    parts = {ctas: merge_parts(ctas, 1) for ctas in (1, 7, 8, 15, 16, 31, 32, 63, 64, 127, 528)}
    assert parts == {1: 1, 7: 1, 8: 4, 15: 4, 16: 4, 31: 4, 32: 16, 63: 16, 64: 16, 127: 16, 528: 16}
    assert merge_parts(264, 64) == 1


def test_warps_multiply_codes_of_many_rows_together_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the 24 rows of 5 or 6 queries of 4 heads on; never beside scores or sinks, nor in full precision."""
    kernel = AttentionKernel(None, {}, hopper(VARIANTS[0]), torch.zeros(1))
    monkeypatch.setattr(cuda, "is_on_hopper", lambda tensor: True)
    monkeypatch.setattr(cuda, "_compiled", lambda variant, device: replace(kernel, occupancy=hopper(variant)))

    monkeypatch.setattr(cuda, "has_wgmma", lambda device: True)

    def together(queries: int, bits: int, scores: ScoreRequest | None = None, sinks: Tensor | None = None) -> bool:
        inputs = replace(build(Case(8, 2, 128, queries, ((1, 0, 3),), bits), "cpu").inputs, sinks=sinks)
        chosen = find_attention_kernel(inputs, scores)
        assert chosen is not None
        return chosen.occupancy.variant.warpgroup

    assert [together(queries, 8) for queries in (1, 4, 5, 6, 8, 16)] == 2 * [False] + 4 * [True]
    assert together(6, 4)
    assert not together(6, 0)
    assert not together(6, 8, ScoreRequest(torch.zeros(1, 2, 200), "ends", "logits"))
    assert not together(6, 8, sinks=torch.zeros(8))
    monkeypatch.setattr(cuda, "has_wgmma", lambda device: False)
    assert not together(8, 8)


def test_cpu_calls_are_left_to_the_reference() -> None:
    case = build(Case(2, 1, 64, 1, ((1, 0, 3),), 4), "cpu")
    assert not runs_cuda(case)
    assert torch.equal(case.run(), case.run(backend="reference"))


@dataclass(frozen=True)
class Case:
    """One sweep point; per row: visible groups, begin, end (one past the first query's own token)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    queries: int
    rows: tuple[tuple[int, int, int], ...]
    bits: int
    dtype: torch.dtype = torch.bfloat16
    splits: int | None = None
    magnitude: float = 1.0
    bias: float = 3.0

    def __str__(self) -> str:
        name = f"h{self.q_heads}/{self.kv_heads}-d{self.head_dim}-t{self.queries}-{self.bits}bit-{str(self.dtype)[6:]}"
        return f"{name}-b{len(self.rows)}-s{self.splits or 'auto'}-x{self.magnitude:g}"


def runs_cuda(problem: Problem, **softmax: Any) -> bool:
    return find_attention_kernel(replace(problem.inputs, **softmax)) is not None


def build(case: Case, device: str) -> Problem:
    """Random tensors of the case; what must not be read is NaN."""
    generator = torch.Generator(device).manual_seed(case.q_heads + 10 * case.queries)
    batch, capacity = len(case.rows), max(end for _, _, end in case.rows) + case.queries + 3
    held = max(groups for groups, _, _ in case.rows) + 1

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    q = random(batch, case.queries, case.q_heads, case.head_dim) / case.magnitude
    keys, values = (case.magnitude * random(batch, case.kv_heads, capacity, case.head_dim) for _ in range(2))
    groups, begin, end = torch.tensor(case.rows, dtype=torch.int32).to(device).unbind(1)
    for b, (_, first, row) in enumerate(case.rows):
        for buffer in (keys, values):
            buffer[b, :, :first] = torch.nan
            buffer[b, :, max(first, row + case.queries - 1) :] = torch.nan
    if case.bits == 0:
        return Problem(q, keys, values, begin.contiguous(), end.contiguous(), None, None, False)
    codes = QuantizedKV.allocate(batch, case.kv_heads, held, 128, case.head_dim, device, case.bits == 8)
    shape = (batch, case.kv_heads, held * 128, case.head_dim)
    quantize(case.magnitude * (random(*shape) + case.bias), case.magnitude * random(*shape), codes,
             torch.zeros_like(groups), backend="reference")  # fmt: skip
    for b, (count, _, _) in enumerate(case.rows):
        for pair in (codes.key_scale, codes.key_min, codes.value_scale, codes.value_min):
            pair[b, :, count:] = torch.nan
    return Problem(q, keys, values, begin.contiguous(), end.contiguous(), codes, groups.contiguous(), case.bits == 8)


def naive(problem: Problem, sinks: Tensor | None = None) -> Tensor:
    """In float64, over concatenated dequantized and full-precision tokens; sinks: [q_heads], logits without values."""
    batch, queries, q_heads, head_dim = problem.q.shape
    kv_heads = problem.keys.shape[1]
    buffers = (problem.keys, problem.values)
    decoded = (problem.keys[:, :, :0], problem.values[:, :, :0])
    if problem.codes is not None:
        decoded = dequantize(problem.codes, problem.lower, backend="reference")
    out = torch.zeros(problem.q.shape, dtype=torch.float64, device=problem.q.device)
    for b in range(batch):
        count = int(problem.groups[b]) * 128 if problem.groups is not None else 0
        for t in range(queries):
            span = slice(int(problem.begin[b]), max(int(problem.begin[b]), int(problem.end[b]) + t))
            keys, values = (
                torch.cat([past[b, :, :count].double(), buffer[b, :, span].double()], dim=1)
                for past, buffer in zip(decoded, buffers, strict=True)
            )
            if keys.shape[1]:
                q = problem.q[b, t].double().view(kv_heads, -1, head_dim)
                scores = q @ keys.transpose(1, 2) * head_dim**-0.5
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double().view(kv_heads, -1, 1)], dim=-1)
                out[b, t] = (scores.softmax(-1)[..., : keys.shape[1]] @ values).view(q_heads, head_dim)
    return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - expected).norm() / expected.norm())


RAGGED = ((9, 0, 200), (0, 3, 17), (23, 0, 1), (2, 5, 130))
TILES = ((2, 2, 1), (9, 3, 1), (32, 8, 1), (14, 2, 1), (8, 2, 3), (9, 3, 4), (8, 2, 8), (16, 2, 8))  # 1 to 64 rows
THREE_TILES = ((9, 3, 6), (8, 2, 5), (14, 2, 3), (8, 2, 6))  # 18 to 24 rows of several queries
SWEEP = [
    *(Case(*heads, d, queries, RAGGED, bits) for *heads, queries in TILES for d in (64, 128) for bits in (0, 4, 8)),
    *(Case(rows, 1, d, 1, RAGGED, bits) for rows in range(17, 25) for d in (64, 128) for bits in (0, 4, 8)),
    *(Case(*heads, 128, queries, RAGGED, bits) for *heads, queries in THREE_TILES for bits in (0, 4, 8)),
    *(Case(8, 2, 128, 1, RAGGED, bits, splits=splits) for bits in (0, 4, 8) for splits in (1, 2, 7, 40)),
    *(Case(8, 2, d, 4, RAGGED, bits, torch.float16) for d in (64, 128) for bits in (0, 4, 8)),
    *(Case(8, 2, 128, 2, RAGGED, bits, torch.bfloat16, None, x, 0.0) for bits in (4, 8) for x in (1e3, 1e-3)),
    *(Case(8, 2, 128, 2, RAGGED, bits, torch.float16, None, 1e3, 5.0) for bits in (4, 8)),
    *(Case(4, 2, 64, 1, RAGGED * 40, bits) for bits in (0, 4, 8)),  # 160 rows, more than a warp schedules at once
]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_against_naive(case: Case) -> None:
    problem = build(case, "cuda")
    assert runs_cuda(problem)
    out = problem.run(case.splits)
    assert out.dtype == case.dtype and out.shape == problem.q.shape
    assert relative_error(out, naive(problem)) < 5e-3
    assert relative_error(out, problem.run(backend="reference").double()) < 8e-3  # the reference multiplies in bf16


# A row in one split, in a few, which its last CTA reduces, and in many, which the kernel `merge` does.
SINKS = [
    *(Case(8, 2, d, t, RAGGED, bits, splits=splits)
      for d in (64, 128) for t in (1, 5) for bits in (0, 4, 8) for splits in (1, 7, 80)),
    *(Case(64, 8, 64, 1, RAGGED, bits) for bits in (0, 4, 8)),
    Case(9, 3, 64, 4, RAGGED, 8, torch.float16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", SINKS, ids=str)
def test_sinks_join_the_softmax(case: Case) -> None:
    """Of usual size, above every score, and far below and far above: the last leaves nothing of its head's values."""
    problem = build(case, "cuda")
    sinks = torch.linspace(-2, 12, case.q_heads, device="cuda")
    sinks[:2] = torch.tensor([-1e4, 1e4])
    assert runs_cuda(problem, sinks=sinks)
    out = problem.run(case.splits, sinks=sinks)
    assert (out[:, :, 1] == 0).all()
    assert relative_error(out, naive(problem, sinks)) < 5e-3
    empty = replace(problem, groups=None if problem.groups is None else 0 * problem.groups, end=0 * problem.end - 8)
    assert (empty.run(case.splits, sinks=sinks) == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("head_dim", "queries"), [(64, 1), (128, 1), (128, 8)])
def test_long_sums_that_nearly_cancel(bits: int, head_dim: int, queries: int) -> None:
    """Of 128k random values about a 300th of one remains: no offset of the codes may pass through the sum."""
    problem = build(Case(8, 2, head_dim, queries, ((1024, 0, 200),), bits, bias=0.0), "cuda")
    assert relative_error(problem.run(), naive(problem)) < 4e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("splits", [None, 80], ids=["fused", "merged"])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_rows_that_see_nothing_are_zero(bits: int, splits: int | None) -> None:
    """Whether the last CTA reduces a row's splits or a kernel of its own."""
    problem = build(Case(8, 2, 128, 3, ((0, 4, 4), (bits // 4, 6, 4), (0, 0, 0)), bits), "cuda")
    empty = replace(problem, end=problem.end - torch.tensor([3, 0, 0], device="cuda").int())
    out = empty.run(splits)
    assert (out[0] == 0).all() and (out[2, 0] == 0).all() and (out[2, 1] != 0).all()
    assert relative_error(out, naive(empty)) < 5e-3
    groups = None if problem.groups is None else torch.zeros_like(problem.groups)
    nothing = replace(problem, groups=groups, end=torch.zeros_like(problem.end) - 4)
    assert (nothing.run(splits) == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 5, 40])
def test_writes_the_partials_that_it_declares(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the buffers themselves, which are poisoned before."""
    problem = build(Case(32, 8, 128, 2, ((37, 0, 200), (37, 0, 200)), 8), "cuda")
    empty, results = torch.empty, []

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        results.append(empty(*args, **kwargs))
        return results[-1].fill_(torch.nan) if results[-1].is_floating_point() else results[-1]

    monkeypatch.setattr(torch, "empty", poisoned)
    problem.run(splits)
    partial, sums = results[1:3]  # after the output
    batch, queries, q_heads, head_dim = problem.q.shape
    declared_bytes = ops.partial_bytes(batch, queries, q_heads, head_dim, splits)
    assert 4 * int(partial.isfinite().sum() + sums.isfinite().sum()) == declared_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_a_million_tokens(bits: int) -> None:
    """Offsets beyond 2 ** 31 bytes of codes, and sums over a million tokens."""
    codes = QuantizedKV.allocate(1, 64 if bits == 4 else 32, 8192, 128, 128, "cuda", bits == 8)
    kv_heads = codes.kv_heads
    for plane in (codes.key_upper, codes.key_lower, codes.value_upper, codes.value_lower):
        if plane is not None:
            plane.random_(0, 256)
    # Values with a mean: a million random ones would cancel a thousandfold, and leave rounding.
    for scale, low, mean in ((codes.key_scale, codes.key_min, -7.5), (codes.value_scale, codes.value_min, -6.0)):
        scale.uniform_(0.02, 0.2)
        low.copy_(mean * scale)
    q = torch.randn(1, 1, kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    buffer = torch.randn(1, kv_heads, 8, 128, device="cuda", dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    problem = Problem(q, buffer, buffer, zero, zero + 3, codes, zero + 8192, bits == 8)
    assert codes.key_upper.nbytes >= 2**31
    out = problem.run()
    head = slice(kv_heads - 1, kv_heads)  # the farthest offsets
    planes = {name: None if plane is None else plane[:, head].contiguous() for name, plane in vars(codes).items()}
    last = replace(problem, q=q[:, :, head], keys=buffer[:, head], values=buffer[:, head], codes=QuantizedKV(**planes))
    assert relative_error(out[:, :, head], naive(last)) < 5e-3


@pytest.mark.gpu
def test_a_million_full_precision_tokens() -> None:
    """Offsets beyond 2 ** 31 elements."""
    keys, values = (torch.randn(1, 17, 2**20, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = 3 * torch.randn(1, 1, 17, 128, device="cuda", dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    problem = Problem(q, keys, values, zero, zero + 2**20 - 5, None, None, False)
    last = replace(problem, q=q[:, :, 16:], keys=keys[:, 16:], values=values[:, 16:])
    assert relative_error(problem.run()[:, :, 16:], naive(last)) < 5e-3


@pytest.mark.gpu
def test_one_graph_serves_growing_lengths() -> None:
    """Captured once, replayed with other lengths in the same device tensors: no host synchronization."""
    problem = build(Case(32, 8, 128, 2, ((60, 0, 200), (60, 0, 200)), 8), "cuda")
    for tensor in (problem.keys, problem.values):
        tensor.nan_to_num_()
    problem.run()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = problem.run()
    for groups, end in ((60, 200), (3, 17), (0, 1)):
        problem.groups.fill_(groups)
        problem.end.fill_(end)
        graph.replay()
        assert relative_error(out, naive(problem)) < 5e-3


@pytest.mark.gpu
def test_misaligned_buffers_are_left_to_triton() -> None:
    problem = build(Case(8, 2, 128, 1, RAGGED, 4), "cuda")
    shifted = torch.empty(problem.keys.numel() + 1, dtype=problem.keys.dtype, device="cuda")[1:].view_as(problem.keys)
    shifted.copy_(problem.keys)
    moved = replace(problem, keys=shifted)
    assert runs_cuda(problem) and not runs_cuda(moved)
    assert relative_error(moved.run(), naive(moved)) < 1e-2


def launched(
    launches: Any,
    q: Tensor,
    keys: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor],
    splits: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Runs 12 query heads of 4 KV heads over INT4 codes of 5 groups, as on an H200."""
    variant = AttentionVariant(64, 4, True, 8)
    kernel = AttentionKernel("attend", MERGES, hopper(variant), torch.zeros(4096, dtype=torch.int32))
    codes = QuantizedKV.allocate(2, 4, 5, 128, 64, "cpu", lower=False)
    begin, end, groups = lengths
    inputs = AttentionInputs(q, keys, keys + 1, begin, end, codes, groups, softmax_scale=0.25, sinks=sinks)
    out = kernel.run(inputs, splits)
    return out, launches.asked


def cpu_case() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    q = torch.zeros(2, 2, 12, 64, dtype=torch.bfloat16)
    keys = torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16)
    begin, end, groups = (torch.full((2,), i, dtype=torch.int32) for i in range(3))
    return q, keys, (begin, end, groups)


def test_the_launch_passes_pointers_strides_and_sizes(launches: Any) -> None:
    """Eight (batch row, KV head) pairs of 5 groups and 4 tiles of 32 tokens: short rows, so one CTA per SM, with
    a third of its memory."""
    q, keys, lengths = cpu_case()
    sinks = torch.zeros(12)
    out, calls = launched(launches, q, keys, lengths, None, sinks)
    kernel, grid, threads, params, shared_bytes, early = calls[0]
    assert (kernel, grid, threads, early) == ("attend", (HOPPER_SMS // 8 * 8, 1, 1), 128, True)
    assert HOPPER_BYTES // (shared_bytes + RESERVED_BYTES) == 3
    assert (params.q, params.keys, params.out) == (q.data_ptr(), keys.data_ptr(), out.data_ptr())
    assert params.sinks == sinks.data_ptr()
    assert [params.begin, params.end, params.groups] == [length.data_ptr() for length in lengths]
    sizes = (
        params.batch,
        params.kv_heads,
        params.q_heads_per_kv,
        params.queries,
        params.capacity,
        params.group_capacity,
    )
    assert sizes == (2, 4, 3, 2, 100, 5)
    assert (params.q_batch_stride, params.q_query_stride, params.q_head_stride) == (2 * 12 * 8, 12 * 8, 8)
    assert (params.key_batch_stride, params.key_head_stride, params.key_stride) == (4 * 100 * 8, 100 * 8, 8)
    assert params.value_codes.lower is None
    assert params.scale == 0.25
    assert out.shape == q.shape


def test_many_splits_are_reduced_by_a_kernel_of_their_own(launches: Any) -> None:
    """Six rows of 64 channels: 42 splits are 16128 elements, 43 are 16512, beyond the 16384 that one CTA reduces."""
    q, keys, lengths = cpu_case()
    for splits, fused in ((42, True), (43, False)):
        launches.asked.clear()
        _, calls = launched(launches, q, keys, lengths, splits)
        assert calls[0][1] == (8 * splits, 1, 1)
        assert calls[0][3].fuse_reduction == fused
        # 44 splits are six batches of eight, so all 16 groups of 16 lanes share each of the six rows.
        merges = [(kernel, grid, threads) for kernel, grid, threads, *_ in calls[1:]]
        assert merges == ([] if fused else [("merge of 16", (6, 8, 1), 256)])


def test_lengths_that_must_be_copied_first_are_not_read_early(launches: Any) -> None:
    q, keys, lengths = cpu_case()
    begin = torch.zeros(4, dtype=torch.int32)[::2]
    _, calls = launched(launches, q, keys, (begin, *lengths[1:]), None)
    assert not calls[0][-1]


def test_a_started_tile_counts_as_one() -> None:
    """8 rows of 263 groups and 10 tokens are 8 x 264 tiles: four for each of four CTAs per SM."""
    kernel = AttentionKernel("attend", MERGES, hopper(AttentionVariant(128, 4, True, 8)), torch.zeros(1))
    assert kernel._grid(8, (2, 4, 1, 1, 10, 263), None)[0] == 4 * HOPPER_SMS
    assert kernel._grid(8, (2, 4, 1, 1, 0, 263), None)[0] == 3 * HOPPER_SMS // 8 * 8


def test_every_split_has_a_partial_of_its_own() -> None:
    """42 CTAs cut a list of 8 rows into at most 42 + 7 splits; indices go up to 42 + 8."""
    kernel = AttentionKernel("attend", MERGES, hopper(AttentionVariant(64, 4, True, 8)), torch.zeros(1))
    outputs = kernel._outputs(torch.zeros(2, 2, 12, 64), kv_rows=8, rows=6, ctas=42)
    assert outputs["partial"].shape == (50, 6, 64)
    assert outputs["lse"].shape == (50, 6)
    assert outputs["row_ctas"].shape == (8, 2)
