"""Declared cost of decode attention, counted from its tensors.

The cost model uses the formulas of `ridgeplan.roofline.ops`; a test checks that both are equal.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.scores import ScoreRequest
from ridgeplan.kernels.device.launch_metadata import launch_metadata
from ridgeplan.kernels.kv_cache.cost import codes_of, group_bytes
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.roofline.cost import Cost


def attention_cost(
    q: Tensor,
    keys: Tensor,
    codes: QuantizedKV | None,
    lower: bool,
    quantized_tokens: int,
    full_tokens: int,
    splits: int,
) -> Cost:
    """Decode attention where each row sees `quantized_tokens` (whole groups) and `full_tokens` slots, merge included.

    Lengths are on the device, so the caller passes them.
    """
    attending = split_attention_cost(q, keys, codes, lower, quantized_tokens, full_tokens, splits)
    partial = torch.empty(*q.shape[:3], splits, q.shape[3], dtype=torch.float32, device="meta")
    return attending + merge_cost(partial, partial[..., 0], q.element_size())


def split_attention_cost(
    q: Tensor,
    keys: Tensor,
    codes: QuantizedKV | None,
    lower: bool,
    quantized_tokens: int,
    full_tokens: int,
    splits: int,
) -> Cost:
    """Like `attention_cost`, without the merge: each split writes a float32 partial and its log-sum-exp.

    KV is read once, as all query heads of a KV head share a tile.
    """
    kv_rows = keys.shape[0] * keys.shape[1]
    read_bytes = q.numel() * q.element_size()
    read_bytes += 2 * kv_rows * full_tokens * keys.shape[3] * keys.element_size()
    if codes is not None:
        groups = quantized_tokens // codes.group
        read_bytes += kv_rows * groups * group_bytes(codes, planes=2 if lower else 1)
    lse = q.numel() // q.shape[3] * splits
    return Cost(
        flops=4 * q.numel() * (quantized_tokens + full_tokens),
        read_bytes=read_bytes,
        write_bytes=4 * (lse * q.shape[3] + lse),
    )


def scores_cost(request: ScoreRequest, q: Tensor, tokens: int) -> Cost:
    """What attention adds to leave the scores of `tokens` tokens of each row."""
    lse = request.lse if request.what == "probabilities" else None
    lse_bytes = 0 if lse is None else lse.nbytes
    batch, _, width = request.out.shape
    summed = len(request.summed(q.shape[1]))
    return Cost(
        flops=2 * batch * q.shape[2] * summed * tokens,
        read_bytes=lse_bytes,
        write_bytes=request.out.nbytes // width * tokens + lse_bytes,
    )


def merge_cost(partial: Tensor, lse: Tensor, element_bytes: int) -> Cost:
    """Merge of all splits' partials [..., splits, D] into an output of `element_bytes` per element."""
    return Cost(
        flops=2 * partial.numel(),
        read_bytes=partial.nbytes + lse.nbytes,
        write_bytes=partial.numel() // partial.shape[-2] * element_bytes,
    )


def attention_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the kernel before the merge, priced at full capacity: reading lengths would synchronize."""
    codes = codes_of(args) if args["BITS"] else None
    quantized_tokens = codes.groups * codes.group if codes is not None else 0
    cost = split_attention_cost(
        args["q"], args["keys"], codes, args["BITS"] == 8, quantized_tokens, args["capacity"], args["splits"]
    )
    return launch_metadata(f"decode_attention_{args['BITS']}bit", cost, args["q"])


def merge_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the merge kernel."""
    partial = args["partial"]
    return launch_metadata("merge", merge_cost(partial, args["lse"], args["out"].element_size()), partial)
