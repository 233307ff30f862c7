"""Triton kernels of the softmax's statistics: each row's largest logit, and the mass of its kept tokens.

A row is read in chunks by separate programs, so that a few rows fill the GPU too; a second kernel joins the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.launch import pdl_options
from ridgeplan.kernels.device.pdl_triton import pdl_launch_dependents_and_wait
from ridgeplan.kernels.sampling.cost import filter_metadata
from ridgeplan.kernels.sampling.distribution import LOG2_E, Distribution

CHUNK = 4096  # tokens of a row per program


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
    """Joins the chunks of a row; without a filter the cutoff is -inf."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED)
    chunk_peaks = tl.load(peaks + row * CHUNKS + every, mask=every < CHUNKS, other=float("-inf"))
    chunk_masses = tl.load(masses + row * CHUNKS + every, mask=every < CHUNKS, other=0.0)
    row_peak = tl.max(chunk_peaks, 0)
    tl.store(peak + row, row_peak)
    tl.store(mass + row, tl.sum(chunk_masses * tl.exp2((chunk_peaks - row_peak) * scale), 0))
    if not FILTERED:
        tl.store(cutoff + row, float("-inf"))


def softmax_distribution_triton(logits: Tensor, temperature: float, cutoff: Tensor | None) -> Distribution:
    """See `ridgeplan.kernels.sampling.softmax_distribution`."""
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
