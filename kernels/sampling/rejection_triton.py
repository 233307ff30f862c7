"""Triton kernels of sampling: peaks and masses of rows, draws by inverse CDF, and speculative acceptance.

A row is read in chunks by programs of their own, so that a few rows fill the machine too. What decides about a
token is summed in integers, in units of 2^-60 of a probability: sums are exact in any order, the kernel that adds
up chunks and the one that looks into one of them agree, and a token of probability 0 can never be drawn.

Log on one H200 (bf16, vocabulary 128256, 32 rows, 8 drafts, us; their bytes take 4 for a verdict, 2 for a draw):
- acceptance recomputed in both kernels instead of launched: 23 for a verdict; every program paid 16 probabilities.
- acceptance as a kernel of its own: predicted 15, measured 18 (3 + 9 + 4); a draw takes 7, softmax before it 6.
- softmax of 288 rows takes 25 in chunks of 4096 or 8192 with 4 or 8 warps, and 37 with 16; its bytes take 17.
- started early, in a chain of one graph over rotating logits (validate/kernels_h200.json), softmax included: a verdict
  37, a draw 11; greedy 22 and 5.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options
from ridgeplan.kernels.device.pdl_triton import pdl_launch_dependents_and_wait
from ridgeplan.kernels.sampling.cost import draw_metadata, filter_metadata
from ridgeplan.kernels.sampling.distribution import Distribution, VerifyResult

CHUNK = 4096  # tokens of a row that one program reads
LOG2_E = 1.4426950408889634


@triton.jit(launch_metadata=filter_metadata)
def _softmax_kernel(
    logits,
    cutoffs,
    peaks,
    masses,
    vocab,
    scale,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each chunk the largest logit, and relative to it the mass of those that count."""
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
    peaks,
    masses,
    peak,
    cutoff,
    mass,
    scale,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the chunks of a row; without a filter nothing is cut off."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED)
    tops = tl.load(peaks + row * CHUNKS + every, mask=every < CHUNKS, other=float("-inf"))
    sums = tl.load(masses + row * CHUNKS + every, mask=every < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    tl.store(peak + row, top)
    tl.store(mass + row, tl.sum(sums * tl.exp2((tops - top) * scale), 0))
    if not FILTERED:
        tl.store(cutoff + row, float("-inf"))


@triton.jit
def _probability(logits, row, tokens, vocab, peaks, cutoffs, masses, scale):
    values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.exp2((values - tl.load(peaks + row)) * scale)
    return tl.where(values >= tl.load(cutoffs + row), weights, 0.0) / tl.load(masses + row)


@triton.jit
def _store_counts(counts, row, accepted, max_tokens, GAMMA: tl.constexpr):
    """Of a row how many tokens are kept, and how many drafts accepted and judged."""
    limit = tl.minimum(max_tokens, GAMMA)
    # A row that fills its room ends with an accepted draft, which becomes the pending token.
    full = (accepted == limit) & (max_tokens <= GAMMA)
    tl.store(counts + row * 3, (accepted + 1 - full.to(tl.int32)).to(tl.int64))
    tl.store(counts + row * 3 + 1, accepted.to(tl.int64))
    tl.store(counts + row * 3 + 2, tl.minimum(accepted + 1, limit).to(tl.int64))


@triton.jit
def _accept_kernel(
    target,
    draft,
    drafted,
    max_tokens,
    uniform,
    counts,
    vocab,
    scale,
    draft_scale,
    GAMMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts the drafts of a row up to the first rejected one, or to what it has room for."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(max_tokens + row)
    accepted = limit * 0
    going = limit > 0
    for j in tl.static_range(GAMMA):
        token = tl.load(drafted + row * GAMMA + j)
        p = _probability(target[0], row * (GAMMA + 1) + j, token, vocab, target[1], target[2], target[3], scale)
        q = _probability(draft[0][j], row, token, vocab, draft[1][j], draft[2][j], draft[3][j], draft_scale)
        passed = tl.load(uniform + row * (GAMMA + 1) + j) * q.to(tl.float64) < p.to(tl.float64)
        going = going & passed & (j < limit)
        accepted += going.to(tl.int32)
    _store_counts(counts, row, accepted, limit, GAMMA)


@triton.jit
def _weights(target, draft, accepted, row, tokens, vocab, scale, draft_scale, GAMMA: tl.constexpr):
    """In units of 2^-60 what is drawn from after `accepted` drafts, (p - q)+, and p, which it is where q is over."""
    at = row * (GAMMA + 1) + accepted
    p = _probability(target[0], at, tokens, vocab, target[1], target[2], target[3], scale)
    rest = p
    for j in tl.static_range(GAMMA):
        if accepted == j:
            q = _probability(draft[0][j], row, tokens, vocab, draft[1][j], draft[2][j], draft[3][j], draft_scale)
            rest = tl.maximum(p - q, 0.0)
    return (rest * 1152921504606846976.0).to(tl.int64), (p * 1152921504606846976.0).to(tl.int64)


@triton.jit(launch_metadata=draw_metadata)
def _weigh_kernel(
    target, draft, counts, sums, vocab, scale, draft_scale,
    GAMMA: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums of each chunk's weights, [rows, 2, chunks]."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted = tl.load(counts + row * 3 + 1) if GAMMA > 0 else 0
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    rest, whole = _weights(target, draft, accepted, row, tokens, vocab, scale, draft_scale, GAMMA)
    tl.store(sums + row * 2 * CHUNKS + chunk, tl.sum(rest, 0))
    tl.store(sums + (row * 2 + 1) * CHUNKS + chunk, tl.sum(whole, 0))


@triton.jit
def _pick_kernel(
    target, draft, counts, sums, drafted, uniform, out, vocab, scale, draft_scale,
    GAMMA: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds the chunk of a row that its uniform number falls in, then the token, which follows the accepted drafts."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    accepted = tl.load(counts + row * 3 + 1) if GAMMA > 0 else 0
    every = tl.arange(0, PADDED)
    rests = tl.load(sums + row * 2 * CHUNKS + every, mask=every < CHUNKS, other=0)
    wholes = tl.load(sums + (row * 2 + 1) * CHUNKS + every, mask=every < CHUNKS, other=0)
    some = tl.sum(rests, 0) > 0
    sizes = tl.where(some, rests, wholes)
    total = tl.sum(sizes, 0)
    wanted = (tl.load(uniform + row * (GAMMA + 1) + GAMMA) * total.to(tl.float64)).to(tl.int64)
    wanted = tl.minimum(wanted, total - 1)
    chunk = tl.sum((tl.cumsum(sizes, 0) <= wanted).to(tl.int32), 0)
    wanted -= tl.sum(tl.where(every < chunk, sizes, 0), 0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    rest, whole = _weights(target, draft, accepted, row, tokens, vocab, scale, draft_scale, GAMMA)
    reached = tl.cumsum(tl.where(some, rest, whole), 0)
    token = chunk * CHUNK + tl.sum((reached <= wanted).to(tl.int32), 0)
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    for j in tl.static_range(GAMMA):
        kept = tl.load(drafted + row * GAMMA + j)
        tl.store(out + row * (GAMMA + 1) + j, tl.where(accepted == j, token, kept))
    tl.store(out + row * (GAMMA + 1) + GAMMA, token)


def softmax_triton(logits: Tensor, temperature: float, cutoff: Tensor | None) -> Distribution:
    """See `ridgeplan.kernels.sampling.softmax`."""
    logits = logits.contiguous()
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    rows, chunks = lead.numel(), triton.cdiv(vocab, CHUNK)
    peaks, masses = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    peak, mass, whole = torch.empty(3, *lead, dtype=torch.float32, device=logits.device)
    filtered, scale = cutoff is not None, LOG2_E / temperature
    cutoff = whole if cutoff is None else cutoff
    _softmax_kernel[(rows, chunks)](
        logits,
        cutoff,
        peaks,
        masses,
        vocab,
        scale,
        FILTERED=filtered,
        CHUNKS=chunks,
        CHUNK=CHUNK,
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


def draw_triton(distribution: Distribution, uniform: Tensor) -> Tensor:
    """See `ridgeplan.kernels.sampling.draw`: what follows no drafts."""
    tokens = uniform.new_empty(uniform.shape, dtype=torch.int64)
    _replace(_Round(distribution, ()), None, None, uniform.contiguous(), tokens)
    return tokens


def rejection_sample_triton(
    target: Distribution, drafts: Sequence[Distribution], drafted: Tensor, max_tokens: Tensor, uniform: Tensor
) -> VerifyResult:
    """See `ridgeplan.kernels.sampling.rejection_sample`."""
    round_, drafted, uniform = _Round(target, drafts), drafted.contiguous(), uniform.contiguous()
    tokens, counts = torch.empty_like(uniform, dtype=torch.int64), drafted.new_empty(len(drafted), 3)
    _accept_kernel[(len(drafted),)](
        *round_.figures,
        drafted,
        max_tokens,
        uniform,
        counts,
        *round_.sizes,
        GAMMA=round_.gamma,
        num_warps=1,
        **pdl_options(drafted),
    )
    _replace(round_, counts, drafted, uniform, tokens)
    return VerifyResult(tokens, *counts.unbind(1))


class _Round:
    """Arguments that the kernels of a round share: pointers of the target and, one tuple for each kind, of drafts."""

    def __init__(self, target: Distribution, drafts: Sequence[Distribution]) -> None:
        self.gamma = len(drafts)
        figures = zip(*((d.logits, d.peak, d.cutoff, d.mass) for d in drafts), strict=True)
        self.figures = (target.logits, target.peak, target.cutoff, target.mass), tuple(figures) or ((), (), (), ())
        draft_scale = LOG2_E / drafts[0].temperature if drafts else 0.0
        self.sizes = target.vocab, LOG2_E / target.temperature, draft_scale


def _replace(round_: _Round, counts: Tensor | None, drafted: Tensor | None, uniform: Tensor, tokens: Tensor) -> None:
    """Fills tokens [rows, gamma + 1] with the drafts and, after the accepted ones, a token drawn for the row."""
    gamma, vocab = round_.gamma, round_.sizes[0]
    rows, chunks = uniform.numel() // (gamma + 1), triton.cdiv(vocab, CHUNK)
    sums = torch.empty(rows, 2, chunks, dtype=torch.int64, device=uniform.device)
    sizes = {"GAMMA": gamma, "CHUNKS": chunks, "CHUNK": CHUNK, "num_warps": 8, **pdl_options(uniform)}
    _weigh_kernel[(rows, chunks)](*round_.figures, counts, sums, *round_.sizes, **sizes)
    _pick_kernel[(rows,)](
        *round_.figures, counts, sums, drafted, uniform, tokens, *round_.sizes,
        PADDED=triton.next_power_of_2(chunks), **sizes,
    )  # fmt: skip
