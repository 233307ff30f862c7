"""Triton kernels of greedy decoding: the likeliest token of each row, and the number of drafts that equal it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options
from ridgeplan.kernels.device.pdl_triton import pdl_launch_dependents_and_wait
from ridgeplan.kernels.sampling.cost import filter_metadata
from ridgeplan.kernels.sampling.distribution import Greedy, VerifyResult
from ridgeplan.kernels.sampling.rejection_triton import _store_counts

CHUNK = 8192  # tokens of a row per program


@triton.jit(launch_metadata=filter_metadata)
def _best_kernel(logits, peaks, places, vocab, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The largest logit of each chunk, and the first token that has it."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    tl.store(peaks + row * CHUNKS + chunk, peak)
    tl.store(places + row * CHUNKS + chunk, tl.min(tl.where(values == peak, tokens, vocab), 0))


@triton.jit
def _join_best_kernel(peaks, places, best, vocab, CHUNKS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """The first token that has a row's largest logit; the last of the vocabulary where the logits are NaN."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED)
    chunk_peaks = tl.load(peaks + row * CHUNKS + every, mask=every < CHUNKS, other=float("-inf"))
    first = tl.load(places + row * CHUNKS + every, mask=every < CHUNKS, other=2147483647)
    token = tl.min(tl.where(chunk_peaks == tl.max(chunk_peaks, 0), first, 2147483647), 0)
    tl.store(best + row, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _agree_kernel(best, drafted, max_tokens, counts, GAMMA: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PADDED)
    wanted = tl.load(best + row * (GAMMA + 1) + index, mask=index < GAMMA, other=-1)
    agreeing = tl.load(drafted + row * GAMMA + index, mask=index < GAMMA, other=-2) == wanted
    limit = tl.load(max_tokens + row)
    _store_counts(counts, row, tl.min(tl.where(agreeing & (index < limit), PADDED, index), 0), limit, GAMMA)


def greedy_triton(logits: Tensor) -> Greedy:
    """See `ridgeplan.kernels.sampling.filter_logits`."""
    logits = logits.contiguous()
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    early = pdl_options(logits)
    rows, chunks = lead.numel(), triton.cdiv(vocab, CHUNK)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    best = torch.empty(lead, dtype=torch.int64, device=logits.device)
    _best_kernel[(rows, chunks)](logits, peaks, places, vocab, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8, **early)
    _join_best_kernel[(rows,)](
        peaks, places, best, vocab, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=1, **early
    )
    return Greedy(best)


def agree_triton(target: Greedy, drafted: Tensor, max_tokens: Tensor) -> VerifyResult:
    """See `ridgeplan.kernels.sampling.rejection_sample`."""
    rows, gamma = drafted.shape
    counts = drafted.new_empty(rows, 3)
    _agree_kernel[(rows,)](
        target.best, drafted.contiguous(), max_tokens, counts,
        GAMMA=gamma, PADDED=triton.next_power_of_2(gamma + 1), num_warps=1, **pdl_options(drafted),
    )  # fmt: skip
    return VerifyResult(target.best, *counts.unbind(1))
