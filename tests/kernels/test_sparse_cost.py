"""What the kernels of sparse drafts declare equals what the roofline prices."""

import pytest
import torch

from ridgeplan.kernels.attention.cost import scores_cost, split_attention_cost
from ridgeplan.kernels.attention.scores import ScoreRequest, What
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import page_bounds
from ridgeplan.kernels.selection.cost import pack_cost, page_scores_cost, top_k_cost, two_bit_cost, two_bit_top_k_cost
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys
from ridgeplan.kernels.sparse_attention.cost import progressive_cost, sparse_attention_cost, sparse_attention_metadata
from ridgeplan.kernels.sparse_attention.triton import _sparse_attention_kernel
from ridgeplan.roofline import ops
from ridgeplan.roofline.ops import attention, merge

SHAPES = pytest.mark.parametrize(
    ("batch", "kv_heads", "q_heads", "head_dim", "group"),
    [(1, 8, 32, 128, 128), (3, 3, 9, 64, 128), (2, 2, 14, 64, 32)],
    ids=["llama", "smollm", "qwen"],
)


def store(batch: int, kv_heads: int, head_dim: int, group: int) -> tuple[QuantizedKV, DraftPlanes]:
    codes = QuantizedKV.allocate(batch, kv_heads, 6, group, head_dim, "cpu", lower=True)
    return codes, DraftPlanes.allocate(codes)


@SHAPES
def test_selections(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int) -> None:
    codes, planes = store(batch, kv_heads, head_dim, group)
    q = torch.zeros(batch, 1, q_heads, head_dim, dtype=torch.bfloat16)
    expected = ops.two_bit_scan(batch, q_heads, kv_heads, head_dim, 2 * group, group)
    assert two_bit_cost(q, TwoBitKeys.of(codes, planes), 2 * group) == expected
    chosen = torch.zeros(batch, kv_heads, 9, dtype=torch.int32)
    found = two_bit_top_k_cost(q, TwoBitKeys.of(codes, planes), 2 * group, chosen)
    assert found == ops.two_bit_top_k(batch, q_heads, kv_heads, head_dim, 2 * group, group, 9)
    bounds = page_bounds(torch.zeros(batch, kv_heads, 64, head_dim, dtype=torch.bfloat16), 16)
    assert page_scores_cost(q, bounds) == ops.page_scan(batch, q_heads, kv_heads, head_dim, 4, 2)
    scores, index = torch.zeros(batch * kv_heads, 100), torch.zeros(batch * kv_heads, 7, dtype=torch.int32)
    assert top_k_cost(scores, index) == ops.top_k(batch * kv_heads, 100, 7)
    assert pack_cost(codes, planes) == ops.pack_draft_planes(batch, kv_heads, head_dim, 6 * group)


@SHAPES
@pytest.mark.parametrize(("what", "relative"), [("logits", 0), ("probabilities", 1)])
def test_scores(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int, what: What, relative: int) -> None:
    """Two of five queries, of six groups in a wider tensor."""
    q = torch.zeros(batch, 5, q_heads, head_dim)
    request = ScoreRequest(torch.zeros(batch, kv_heads, 900), "ends", what, torch.zeros(batch, q_heads))
    expected = ops.collect_scores(batch, q_heads, kv_heads, 6 * group, 2, relative)
    assert scores_cost(request, q, 6 * group) == expected


@SHAPES
@pytest.mark.parametrize(("bits", "page"), [(0, 1), (4, 1), (8, 1), (4, 16)])
def test_sparse_attention(
    batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int, bits: int, page: int
) -> None:
    codes, _ = store(batch, kv_heads, head_dim, group)
    q = torch.zeros(batch, 3, q_heads, head_dim, dtype=torch.bfloat16)
    keys = torch.zeros(batch, kv_heads, 200, head_dim, dtype=torch.bfloat16)
    index = torch.zeros(batch, 1, 96 // page, dtype=torch.int32)
    found = sparse_attention_cost(q, keys, codes if bits else None, bits == 8, index, 96, 150, 5, page)
    entries = batch * 96 // page
    expected = ops.sparse_attention(batch, 3, q_heads, kv_heads, head_dim, 96, 150, bits, 2, group, 5, entries)
    assert found == expected


@SHAPES
def test_progressive(batch: int, kv_heads: int, q_heads: int, head_dim: int, group: int) -> None:
    codes, planes = store(batch, kv_heads, head_dim, group)
    q = torch.zeros(batch, 1, q_heads, head_dim, dtype=torch.bfloat16)
    keys = torch.zeros(batch, kv_heads, 200, head_dim, dtype=torch.bfloat16)
    found = progressive_cost(q, keys, codes, planes, 4 * group, 32, 150, 5)
    expected = ops.progressive_attention(batch, q_heads, kv_heads, head_dim, 4 * group, 32, 150, 2, group, 5)
    assert found == expected


def test_all_tokens_chosen_cost_what_contiguous_attention_does() -> None:
    """Without an index list, and without the merge, which both leave out here."""
    whole = attention(2, 1, 32, 8, 128, 1024, 200, 4, 2, 128, 6)
    chosen = ops.sparse_attention(2, 1, 32, 8, 128, 1024, 200, 4, 2, 128, 6, 0)
    assert chosen + merge(2, 1, 32, 128, 6, 2) == whole


def test_progressive_at_128k_by_hand() -> None:
    """A token of 128 channels has 32 bytes of 2-bit keys and 4 of their scales; a chosen one 128 of codes and 8."""
    cost = ops.progressive_attention(1, 32, 8, 128, 131072, 9175, 0, 2, 128, 1)
    query = 32 * 128 * 2
    assert cost.read_bytes - query == 8 * (131072 * 36 + 9175 * 136)


def test_two_bit_top_k_at_128k_by_hand() -> None:
    """A token of 128 channels has 36 bytes, and a bin of 2 that is written and read; a chosen one has a number of 4."""
    cost = ops.two_bit_top_k(4, 32, 8, 128, 131072, 128, 1920)
    assert cost.read_bytes == 32 * 131072 * (36 + 2)
    assert cost.write_bytes == 32 * (131072 * 2 + 1920 * 4)


def test_launch_metadata_reads_the_kernels_own_arguments() -> None:
    """Built from the kernel's argument names, so a renamed argument fails here."""
    codes, _ = store(1, 2, 64, 32)
    q, keys = torch.zeros(1, 1, 4, 64), torch.zeros(1, 2, 10, 64)
    index = torch.zeros(1, 2, 24, dtype=torch.int32)
    known = {
        **vars(codes), "q": q, "keys": keys, "index": index, "BITS": 4, "PAGE": 1, "GROUP": 32, "HEAD_DIM": 64,
        "KV_HEADS": 2, "capacity": 10, "splits": 3,
    }  # fmt: skip
    args = {name: known.get(name) for name in _sparse_attention_kernel.arg_names}
    cost = sparse_attention_cost(q, keys, codes, False, index, 24, 10, 3)
    found = sparse_attention_metadata((1,), None, args)
    assert found == {"name": "sparse_decode_attention_4bit", "flops32": cost.flops, "bytes": cost.bytes}
    assert cost.write_bytes == split_attention_cost(q, keys, None, False, 0, 10, 3).write_bytes
