"""Triton kernels of sampling: argmax, softmax statistics, inverse-CDF draws and rejection sampling.

A row is read in chunks by separate programs, so that even a few rows fill the GPU; a second kernel joins the chunks.
Weights are summed as integers in units of 2^-60 of a probability, so sums are exact in any order. The kernel that adds
up chunks and the one that searches a chunk therefore agree, and tokens of probability 0 are never drawn.

A distribution is passed as the tuple (logits, peaks, cutoffs, masses); the drafts' as a tuple of four tuples, one entry
per draft in each. Kernels unpack them into names first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import launch_metadata, pdl_launch_dependents_and_wait
from ridgeplan.kernels.sampling import draw_cost, filter_cost
from ridgeplan.kernels.sampling.reference import (
    GOLDEN,
    LOG2_E,
    MIX_1,
    MIX_2,
    STREAM_DRAWS,
    Distribution,
    Greedy,
    VerifyResult,
)


def _filter_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return launch_metadata("filter_logits", filter_cost(args["logits"]))


# Softmax statistics of a distribution

SOFTMAX_CHUNK = 4096  # tokens of a row per program


@triton.jit(launch_metadata=_filter_metadata)
def _softmax_kernel(
    logits,  # [rows, vocab]
    cutoffs,  # float32 [rows], read if FILTERED
    peaks,  # out: float32 [rows, CHUNKS]
    masses,  # out: float32 [rows, CHUNKS]
    vocab,
    scale,  # log2(e) / temperature
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of each chunk, and the mass of the kept ones relative to it."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    weights = tl.exp2((values - tl.where(peak == float("-inf"), 0.0, peak)) * scale)
    if FILTERED:
        weights = tl.where(values >= tl.load(cutoffs + row), weights, 0.0)
    tl.store(peaks + row * CHUNKS + chunk, peak)
    tl.store(masses + row * CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit
def _join_kernel(
    peaks,  # float32 [rows, CHUNKS]
    masses,  # float32 [rows, CHUNKS]
    peak,  # out: float32 [rows]
    cutoff,  # out unless FILTERED: float32 [rows]
    mass,  # out: float32 [rows]
    scale,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the chunks of a row; without a filter the cutoff is -inf."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED)
    chunk_peaks = tl.load(peaks + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))
    chunk_masses = tl.load(masses + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0)
    row_peak = tl.max(chunk_peaks, 0)
    tl.store(peak + row, row_peak)
    tl.store(mass + row, tl.sum(chunk_masses * tl.exp2((chunk_peaks - row_peak) * scale), 0))
    if not FILTERED:
        tl.store(cutoff + row, float("-inf"))


def softmax_distribution_triton(logits: Tensor, temperature: float, cutoff: Tensor | None) -> Distribution:
    """See `ridgeplan.kernels.sampling.softmax_distribution`."""
    logits = logits.contiguous()
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    rows, chunks = lead.numel(), triton.cdiv(vocab, SOFTMAX_CHUNK)
    peaks, masses = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    peak, mass, unfiltered_cutoff = torch.empty(3, *lead, dtype=torch.float32, device=logits.device)
    filtered, scale = cutoff is not None, LOG2_E / temperature
    cutoff = unfiltered_cutoff if cutoff is None else cutoff
    _softmax_kernel[(rows, chunks)](
        logits,
        cutoff,
        peaks,
        masses,
        vocab,
        scale,
        FILTERED=filtered,
        CHUNKS=chunks,
        CHUNK=SOFTMAX_CHUNK,
        num_warps=8,
        **pdl_options(logits),
    )
    padded = triton.next_power_of_2(chunks)
    _join_kernel[(rows,)](
        peaks,
        masses,
        peak,
        cutoff,
        mass,
        scale,
        FILTERED=filtered,
        CHUNKS=chunks,
        PADDED=padded,
        num_warps=1,
        **pdl_options(logits),
    )
    return Distribution(logits, temperature, peak, cutoff, mass)


# Draws and rejection sampling

REJECTION_CHUNK = 4096  # tokens of a row per program
UNITS = tl.constexpr(2.0**60)  # of the integers in which probabilities are summed


@triton.jit
def _probability(logits, peaks, cutoffs, masses, row, tokens, vocab, scale):
    """Probabilities of `tokens` in a row of a distribution."""
    values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.exp2((values - tl.load(peaks + row)) * scale)
    return tl.where(values >= tl.load(cutoffs + row), weights, 0.0) / tl.load(masses + row)


@triton.jit
def _draft_count(drafted_counts, row, GAMMA: tl.constexpr):
    """A row's drafts; GAMMA where `drafted_counts` is None."""
    count = GAMMA
    if drafted_counts is not None:
        count = tl.load(drafted_counts + row).to(tl.int32)
    return count


@triton.jit
def _store_counts(counts, row, accepted, max_tokens, drafts, GAMMA: tl.constexpr):
    """How many tokens a row keeps, and how many of its drafts are accepted and verified."""
    limit = tl.minimum(max_tokens, GAMMA)
    # A row that reaches max_tokens ends with an accepted draft, which becomes the pending token.
    full = (accepted == limit) & (max_tokens <= GAMMA)
    tl.store(counts + row * 3, (accepted + 1 - full.to(tl.int32)).to(tl.int64))
    tl.store(counts + row * 3 + 1, accepted.to(tl.int64))
    tl.store(counts + row * 3 + 2, tl.minimum(accepted + 1, tl.minimum(limit, drafts)).to(tl.int64))


@triton.jit
def _accept_kernel(
    target,  # a distribution over [rows, GAMMA + 1] positions
    draft,  # GAMMA distributions over [rows] positions; unread if CERTAIN, where a draft's probability is 1
    drafted,  # int64 [rows, GAMMA]
    max_tokens,  # int32 [rows]
    drafted_counts,  # int64 [rows], drafts that count, or None for GAMMA
    uniform,  # float64 [rows, GAMMA + 1]
    counts,  # out: int64 [rows, 3], tokens kept, drafts accepted, drafts verified
    vocab,
    scale,  # log2(e) / temperature of the target
    draft_scale,  # the same of the drafts
    GAMMA: tl.constexpr,
    CERTAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts the drafts of a row up to the first rejected one, or up to max_tokens."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits, peaks, cutoffs, masses = target
    draft_logits, draft_peaks, draft_cutoffs, draft_masses = draft
    limit = tl.load(max_tokens + row)
    drafts = _draft_count(drafted_counts, row, GAMMA)
    accepted = limit * 0
    going = limit > 0
    for j in tl.static_range(GAMMA):
        token = tl.load(drafted + row * GAMMA + j)
        p = _probability(logits, peaks, cutoffs, masses, row * (GAMMA + 1) + j, token, vocab, scale)
        q = p * 0 + 1
        if not CERTAIN:
            q = _probability(
                draft_logits[j], draft_peaks[j], draft_cutoffs[j], draft_masses[j], row, token, vocab, draft_scale
            )
        passed = tl.load(uniform + row * (GAMMA + 1) + j) * q.to(tl.float64) < p.to(tl.float64)
        going = going & passed & (j < tl.minimum(limit, drafts))
        accepted += going.to(tl.int32)
    _store_counts(counts, row, accepted, limit, drafts, GAMMA)


@triton.jit
def _residual_and_target(
    target, draft, drafted, drafted_counts, accepted, row, tokens, vocab, scale, draft_scale,
    GAMMA: tl.constexpr, CERTAIN: tl.constexpr,
):  # fmt: skip
    """The residual (p - q)+ after `accepted` drafts (p after the last draft), and p, in units of 2^-60."""
    logits, peaks, cutoffs, masses = target
    draft_logits, draft_peaks, draft_cutoffs, draft_masses = draft
    p = _probability(logits, peaks, cutoffs, masses, row * (GAMMA + 1) + accepted, tokens, vocab, scale)
    residual = p
    drafts = _draft_count(drafted_counts, row, GAMMA)
    for j in tl.static_range(GAMMA):
        if (accepted == j) & (j < drafts):
            if CERTAIN:
                residual = tl.where(tokens == tl.load(drafted + row * GAMMA + j), 0.0, p)
            else:
                q = _probability(
                    draft_logits[j], draft_peaks[j], draft_cutoffs[j], draft_masses[j], row, tokens, vocab, draft_scale
                )
                residual = tl.maximum(p - q, 0.0)
    return (residual * UNITS).to(tl.int64), (p * UNITS).to(tl.int64)


def _draw_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of the kernel that sums weights, which reads one position of the target and one of the drafts."""
    target, drafts = args["target"][0], args["draft"][0]
    logits = target.view(-1, args["GAMMA"] + 1, target.shape[-1])[:, 0]
    return launch_metadata("draw", draw_cost(logits, *drafts[:1]))


@triton.jit(launch_metadata=_draw_metadata)
def _weigh_kernel(
    target, draft,  # as in _accept_kernel
    counts,  # int64 [rows, 3], or None without drafts
    sums,  # out: int64 [rows, 2, CHUNKS], of the residual and of p
    drafted, drafted_counts,  # as in _accept_kernel, or None without drafts
    vocab, scale, draft_scale,
    GAMMA: tl.constexpr, CERTAIN: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums a chunk's residual and p."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted = tl.load(counts + row * 3 + 1) if GAMMA > 0 else 0
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    residual, p = _residual_and_target(
        target, draft, drafted, drafted_counts, accepted, row, tokens, vocab, scale, draft_scale, GAMMA, CERTAIN
    )
    tl.store(sums + row * 2 * CHUNKS + chunk, tl.sum(residual, 0))
    tl.store(sums + (row * 2 + 1) * CHUNKS + chunk, tl.sum(p, 0))


@triton.jit
def _pick_kernel(
    target, draft, counts, sums,  # as in _weigh_kernel
    drafted, drafted_counts,  # as in _accept_kernel, or None without drafts
    uniform,  # float64 [rows, GAMMA + 1]; the last draws the token
    out,  # out: int64 [rows, GAMMA + 1]
    vocab, scale, draft_scale,
    GAMMA: tl.constexpr, CERTAIN: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Draws a row's token: finds the chunk, then the token in it, and stores it after the accepted drafts."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.load(counts + row * 3 + 1) if GAMMA > 0 else 0
    chunks = tl.arange(0, PADDED)
    residuals = tl.load(sums + row * 2 * CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
    p_sums = tl.load(sums + (row * 2 + 1) * CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
    has_residual = tl.sum(residuals, 0) > 0
    sizes = tl.where(has_residual, residuals, p_sums)
    total = tl.sum(sizes, 0)
    threshold = (tl.load(uniform + row * (GAMMA + 1) + GAMMA) * total.to(tl.float64)).to(tl.int64)
    threshold = tl.minimum(threshold, total - 1)
    chunk = tl.sum((tl.cumsum(sizes, 0) <= threshold).to(tl.int32), 0)
    threshold -= tl.sum(tl.where(chunks < chunk, sizes, 0), 0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    residual, p = _residual_and_target(
        target, draft, drafted, drafted_counts, accepted, row, tokens, vocab, scale, draft_scale, GAMMA, CERTAIN
    )
    reached = tl.cumsum(tl.where(has_residual, residual, p), 0)
    token = chunk * CHUNK + tl.sum((reached <= threshold).to(tl.int32), 0)
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    for j in tl.static_range(GAMMA):
        kept = tl.load(drafted + row * GAMMA + j)
        tl.store(out + row * (GAMMA + 1) + j, tl.where(accepted == j, token, kept))
    tl.store(out + row * (GAMMA + 1) + GAMMA, token)


def draw_triton(distribution: Distribution, uniform: Tensor) -> Tensor:
    """See `ridgeplan.kernels.sampling.draw`: a round without drafts."""
    tokens = uniform.new_empty(uniform.shape, dtype=torch.int64)
    _draw_after_accepted(_RoundArguments(distribution, (), 0), None, None, None, uniform.contiguous(), tokens)
    return tokens


def rejection_sample_triton(
    target: Distribution,
    drafts: Sequence[Distribution] | None,
    drafted: Tensor,
    max_tokens: Tensor,
    uniform: Tensor,
    drafted_counts: Tensor | None,
) -> VerifyResult:
    """See `ridgeplan.kernels.sampling.rejection_sample`. drafts: None for drafts that were certain."""
    round_ = _RoundArguments(target, drafts, drafted.shape[1])
    drafted, uniform = drafted.contiguous(), uniform.contiguous()
    tokens, counts = torch.empty_like(uniform, dtype=torch.int64), drafted.new_empty(len(drafted), 3)
    _accept_kernel[(len(drafted),)](
        *round_.tensors,
        drafted,
        max_tokens,
        drafted_counts,
        uniform,
        counts,
        *round_.sizes,
        GAMMA=round_.gamma,
        CERTAIN=round_.certain,
        num_warps=1,
        **pdl_options(drafted),
    )
    _draw_after_accepted(round_, counts, drafted, drafted_counts, uniform, tokens)
    return VerifyResult(tokens, *counts.unbind(1))


def _tensors(distribution: Distribution) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return distribution.logits, distribution.peak, distribution.cutoff, distribution.mass


class _RoundArguments:
    """Arguments shared by the kernels of a round: the target's tensors, and one tuple per kind of the drafts'."""

    def __init__(self, target: Distribution, drafts: Sequence[Distribution] | None, gamma: int) -> None:
        self.gamma, self.certain = gamma, drafts is None
        drafts = drafts or ()
        of_drafts = zip(*map(_tensors, drafts), strict=True)
        self.tensors = _tensors(target), tuple(of_drafts) or ((), (), (), ())
        draft_scale = LOG2_E / drafts[0].temperature if drafts else 0.0
        self.sizes = target.vocab, LOG2_E / target.temperature, draft_scale


def _draw_after_accepted(
    round_: _RoundArguments,
    counts: Tensor | None,
    drafted: Tensor | None,
    drafted_counts: Tensor | None,
    uniform: Tensor,
    tokens: Tensor,
) -> None:
    """Fills tokens [rows, gamma + 1] with the drafts and, after the accepted ones, a token drawn for the row."""
    gamma, vocab = round_.gamma, round_.sizes[0]
    rows, chunks = uniform.numel() // (gamma + 1), triton.cdiv(vocab, REJECTION_CHUNK)
    sums = torch.empty(rows, 2, chunks, dtype=torch.int64, device=uniform.device)
    sizes = {
        "GAMMA": gamma, "CERTAIN": round_.certain, "CHUNKS": chunks, "CHUNK": REJECTION_CHUNK, "num_warps": 8,
        **pdl_options(uniform),
    }  # fmt: skip
    _weigh_kernel[(rows, chunks)](*round_.tensors, counts, sums, drafted, drafted_counts, *round_.sizes, **sizes)
    _pick_kernel[(rows,)](
        *round_.tensors, counts, sums, drafted, drafted_counts, uniform, tokens, *round_.sizes,
        PADDED=triton.next_power_of_2(chunks), **sizes,
    )  # fmt: skip


# Random numbers of rows

_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit
def _mix(value):
    """splitmix64's finalizer, of uint64."""
    value = (value ^ (value >> 30)) * tl.full((), _MIX_1, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def _row_uniform_kernel(
    seed,  # int64 []
    positions,  # int32 [rows]
    out,  # out: float64 [rows, DRAWS]
    first,  # of the stream's numbers
    DRAWS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The numbers of one row."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    draws = tl.arange(0, PADDED)
    golden = tl.full((), _GOLDEN, tl.uint64)
    key = _mix(tl.load(seed).to(tl.uint64) + (row + 1).to(tl.uint64) * golden)
    key = _mix(key ^ tl.load(positions + row).to(tl.int64).to(tl.uint64))
    number = _mix(key + (first + 1 + draws).to(tl.uint64) * golden)
    values = (number >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    tl.store(out + row * DRAWS + draws, values, mask=draws < DRAWS)


def row_uniform_triton(seed: Tensor, positions: Tensor, stream: int, draws: int) -> Tensor:
    """See `ridgeplan.kernels.sampling.row_uniform`."""
    out = torch.empty(len(positions), draws, dtype=torch.float64, device=positions.device)
    padded = triton.next_power_of_2(max(1, draws))
    _row_uniform_kernel[(len(positions),)](
        seed, positions, out, STREAM_DRAWS * stream, DRAWS=draws, PADDED=padded, num_warps=1, **pdl_options(out)
    )  # fmt: skip
    return out


# Greedy choice and its verification

ARGMAX_CHUNK = 8192  # tokens of a row per program


@triton.jit(launch_metadata=_filter_metadata)
def _best_kernel(
    logits,  # [rows, vocab]
    peaks,  # out: float32 [rows, CHUNKS]
    places,  # out: int32 [rows, CHUNKS], tokens
    vocab,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk, and the first token that has it."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    tl.store(peaks + row * CHUNKS + chunk, peak)
    tl.store(places + row * CHUNKS + chunk, tl.min(tl.where(values == peak, tokens, vocab), 0))


@triton.jit
def _join_best_kernel(
    peaks, places,  # as in _best_kernel
    best,  # out: int64 [rows]
    vocab,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first token that has a row's largest logit; the last of the vocabulary where the logits are NaN."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED)
    chunk_peaks = tl.load(peaks + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))
    first = tl.load(places + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=2147483647)
    token = tl.min(tl.where(chunk_peaks == tl.max(chunk_peaks, 0), first, 2147483647), 0)
    tl.store(best + row, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _agree_kernel(
    best,  # int64 [rows, GAMMA + 1], the target's tokens
    drafted,  # int64 [rows, GAMMA]
    max_tokens,  # int32 [rows]
    drafted_counts,  # as in _accept_kernel
    counts,  # out: int64 [rows, 3], as in _accept_kernel
    GAMMA: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts the drafts of a row up to the first that differs from the target's token, or up to max_tokens."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    expected = tl.load(best + row * (GAMMA + 1) + index, mask=index < GAMMA, other=-1)
    agreeing = tl.load(drafted + row * GAMMA + index, mask=index < GAMMA, other=-2) == expected
    limit = tl.load(max_tokens + row)
    drafts = _draft_count(drafted_counts, row, GAMMA)
    accepted = tl.min(tl.where(agreeing & (index < tl.minimum(limit, drafts)), PADDED, index), 0)
    _store_counts(counts, row, accepted, limit, drafts, GAMMA)


def greedy_triton(logits: Tensor) -> Greedy:
    """See `ridgeplan.kernels.sampling.filter_logits`."""
    logits = logits.contiguous()
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    early = pdl_options(logits)
    rows, chunks = lead.numel(), triton.cdiv(vocab, ARGMAX_CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    best = torch.empty(lead, dtype=torch.int64, device=logits.device)
    _best_kernel[(rows, chunks)](logits, peaks, places, vocab, CHUNKS=chunks, CHUNK=ARGMAX_CHUNK, num_warps=8, **early)
    _join_best_kernel[(rows,)](
        peaks, places, best, vocab, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=1, **early
    )
    return Greedy(best)


def agree_triton(
    target: Greedy, drafted: Tensor, max_tokens: Tensor, drafted_counts: Tensor | None = None
) -> VerifyResult:
    """See `ridgeplan.kernels.sampling.rejection_sample`."""
    rows, gamma = drafted.shape
    counts = drafted.new_empty(rows, 3)
    _agree_kernel[(rows,)](
        target.best, drafted.contiguous(), max_tokens, drafted_counts, counts,
        GAMMA=gamma, PADDED=triton.next_power_of_2(gamma + 1), num_warps=1, **pdl_options(drafted),
    )  # fmt: skip
    return VerifyResult(target.best, *counts.unbind(1))
