"""Declared costs of the selection kernels, counted from their tensors.

The cost model uses the formulas of `ridgeplan.roofline.ops`; a test checks that both are equal.
"""

from torch import Tensor

from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.roofline.cost import Cost

SCORE_BYTES = 4
BIN_BYTES = 2
TOP_K_PASSES = 6  # four histograms, a count and a compaction


def two_bit_cost(q: Tensor, keys: TwoBitKeys, tokens: int) -> Cost:
    """`two_bit_scores` of `tokens` tokens of each row; lengths are on the device, so the caller passes them."""
    share = tokens / (keys.groups * keys.group)
    return Cost(2 * q.numel() * tokens, keys.bytes * share, keys.batch * keys.kv_heads * tokens * SCORE_BYTES)


def two_bit_top_k_cost(q: Tensor, keys: TwoBitKeys, tokens: int, index: Tensor) -> Cost:
    """`two_bit_top_k` of `tokens` tokens of each row into `index`, as its CUDA kernels do it."""
    scan, bins = two_bit_cost(q, keys, tokens), keys.batch * keys.kv_heads * tokens * BIN_BYTES
    return Cost(scan.flops, scan.read_bytes + bins, bins + index.nbytes)


def page_scores_cost(q: Tensor, bounds: Tensor) -> Cost:
    """`page_scores` of all pages."""
    pages = bounds.shape[2]
    return Cost(4 * q.numel() * pages, bounds.nbytes, bounds.shape[0] * bounds.shape[1] * pages * SCORE_BYTES)


def top_k_cost(scores: Tensor, index: Tensor) -> Cost:
    """`top_k` of whole rows of `scores` into `index`."""
    return Cost(TOP_K_PASSES * scores.numel(), TOP_K_PASSES * scores.nbytes, index.nbytes)


def pack_cost(codes: QuantizedKV, out: DraftPlanes) -> Cost:
    """`pack_draft_planes` of all groups."""
    return Cost(read_bytes=codes.key_upper.nbytes + codes.value_upper.nbytes, write_bytes=out.bytes)
