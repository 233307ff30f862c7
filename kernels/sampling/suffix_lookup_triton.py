"""Triton kernels of suffix lookup: chunks of each text are searched by separate programs, and their results joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeplan.kernels.device.cuda import pdl_options
from ridgeplan.kernels.device.triton_helpers import launch_metadata, pdl_launch_dependents_and_wait
from ridgeplan.kernels.sampling.suffix_lookup import suffix_lookup_cost
from ridgeplan.roofline.execution import MAX_SUFFIX_TOKENS

LOOKUP_CHUNK = 2048  # places of a text per program


def _lookup_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return launch_metadata("suffix_lookup", suffix_lookup_cost(args["text"]))


@triton.jit(launch_metadata=_lookup_metadata)
def _match_kernel(
    text,  # int32 [rows, capacity]
    lengths,  # int32 [rows]
    best,  # out: int64 [rows, CHUNKS], matched tokens x capacity + the occurrence's end; 0 without one
    capacity,
    min_match,
    MAX_MATCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best occurrence of a text's suffix that ends in a chunk."""
    pdl_launch_dependents_and_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    ends = chunk * CHUNK + tl.arange(0, CHUNK)
    matching = (ends >= 1) & (ends < length)
    matched = tl.zeros([CHUNK], tl.int32)
    for back in tl.static_range(1, MAX_MATCH + 1):
        token = tl.load(text + row * capacity + tl.maximum(length - back, 0))
        matching = matching & (ends >= back)
        # Places whose match has ended read nothing more.
        matching = matching & (tl.load(text + row * capacity + ends - back, mask=matching, other=-1) == token)
        matched += matching.to(tl.int32)
    ranks = tl.where(matched >= min_match, matched.to(tl.int64) * capacity + ends, 0)
    tl.store(best + row * CHUNKS + chunk, tl.max(ranks, 0))


@triton.jit
def _propose_kernel(
    text, lengths, best,  # as in _match_kernel
    tokens,  # out: int64 [rows, DEPTH]
    counts,  # out: int64 [rows]
    capacity,
    DEPTH: tl.constexpr, PADDED_DEPTH: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Copies what followed a row's best occurrence."""
    pdl_launch_dependents_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks, places = tl.arange(0, PADDED_CHUNKS), tl.arange(0, PADDED_DEPTH)
    rank = tl.max(tl.load(best + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0), 0)
    end = rank % capacity
    period = tl.maximum(tl.load(lengths + row).to(tl.int64) - end, 1)
    proposed = tl.load(text + row * capacity + end + places % period, mask=places < DEPTH, other=0)
    tl.store(tokens + row * DEPTH + places, proposed.to(tl.int64), mask=places < DEPTH)
    tl.store(counts + row, (rank > 0).to(tl.int64) * DEPTH)


def suffix_lookup_triton(text: Tensor, lengths: Tensor, depth: int, min_match: int) -> tuple[Tensor, Tensor]:
    """See `ridgeplan.kernels.sampling.suffix_lookup`."""
    text, lengths, (rows, capacity) = text.contiguous(), lengths.contiguous(), text.shape
    chunks, early = triton.cdiv(capacity, LOOKUP_CHUNK), pdl_options(text)
    best = torch.empty(rows, chunks, dtype=torch.int64, device=text.device)
    _match_kernel[(rows, chunks)](
        text, lengths, best, capacity, min_match,
        MAX_MATCH=MAX_SUFFIX_TOKENS, CHUNKS=chunks, CHUNK=LOOKUP_CHUNK, num_warps=8, **early,
    )  # fmt: skip
    tokens, counts = best.new_empty(rows, depth), best.new_empty(rows)
    _propose_kernel[(rows,)](
        text, lengths, best, tokens, counts, capacity,
        DEPTH=depth, PADDED_DEPTH=triton.next_power_of_2(depth), CHUNKS=chunks,
        PADDED_CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **early,
    )  # fmt: skip
    return tokens, counts
