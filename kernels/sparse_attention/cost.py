"""Declared costs of sparse decode attention, counted from its tensors.

The cost model uses the formulas of `ridgeplan.roofline.ops`; a test checks that both are equal.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeplan.kernels.attention.cost import split_attention_cost
from ridgeplan.kernels.device.launch_metadata import launch_metadata
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.cost import two_bit_cost
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.roofline.cost import Cost

INDEX_BYTES = 4


def sparse_attention_cost(
    q: Tensor,
    keys: Tensor,
    codes: QuantizedKV | None,
    lower: bool,
    index: Tensor,
    chosen_tokens: int,
    full_tokens: int,
    splits: int,
    page: int = 1,
) -> Cost:
    """Split attention to `chosen_tokens` per KV head and `full_tokens` recent slots, without the merge.

    Chosen tokens cost their own bytes: codes with the values' scale and minimum, and the keys' share of their group's.
    """
    dense = split_attention_cost(q, keys, None, False, 0, full_tokens, splits)
    kv_rows, head_dim = keys.shape[0] * keys.shape[1], keys.shape[3]
    if codes is None:
        token_bytes: float = 2 * head_dim * keys.element_size()
    else:
        pairs = codes.key_scale.element_size() * 2 * (head_dim / codes.group + 1)
        token_bytes = 2 * head_dim * (8 if lower else 4) / 8 + pairs
    entries = index.shape[0] * index.shape[1] * chosen_tokens / page
    return dense + Cost(
        flops=4 * q.numel() * chosen_tokens,
        read_bytes=kv_rows * chosen_tokens * token_bytes + INDEX_BYTES * entries,
    )


def progressive_cost(
    q: Tensor,
    keys: Tensor,
    codes: QuantizedKV,
    planes: DraftPlanes,
    tokens: int,
    chosen_tokens: int,
    full_tokens: int,
    splits: int,
) -> Cost:
    """`progressive_attention` as one kernel: scores and choices are neither written nor read."""
    scan = two_bit_cost(q, TwoBitKeys.of(codes, planes), tokens)
    none = torch.empty(0, 1, 0, dtype=torch.int32, device="meta")
    attending = sparse_attention_cost(q, keys, codes, False, none, chosen_tokens, full_tokens, splits)
    return Cost(scan.flops, scan.read_bytes) + attending


def sparse_attention_metadata(grid: tuple[int, ...], metadata: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Launch metadata of the kernel before the merge, priced at full index lists."""
    q, index, page = args["q"], args["index"], args["PAGE"]
    pairs = args["key_scale"].element_size() * 2 * (args["HEAD_DIM"] / args["GROUP"] + 1) if args["BITS"] else 0
    token_bytes = 2 * args["HEAD_DIM"] * (args["BITS"] / 8 or args["keys"].element_size()) + pairs
    dense = split_attention_cost(q, args["keys"], None, False, 0, args["capacity"], args["splits"])
    chosen = index.shape[2] * page
    kv_rows = args["keys"].shape[0] * args["KV_HEADS"]
    cost = dense + Cost(4 * q.numel() * chosen, kv_rows * chosen * token_bytes + INDEX_BYTES * index.numel())
    return launch_metadata(f"sparse_decode_attention_{args['BITS']}bit", cost, q)
