"""The CUDA kernel of attention to an index list against the reference."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, pack_draft_planes
from ridgeplan.kernels.sparse_attention import sparse_decode_attention
from ridgeplan.kernels.sparse_attention.cuda import find_index_list_kernel

pytestmark = pytest.mark.gpu


def lists(batch: int, sets: int, entries: int, listed: tuple[int, ...], ordered: bool) -> tuple[Tensor, Tensor]:
    """Distinct numbers below `entries`, in ascending or any order, of which each row lists some."""
    generator = torch.Generator("cuda").manual_seed(entries)
    index = torch.rand(batch, sets, entries, generator=generator, device="cuda").argsort(-1)
    most = max(*listed, 1)
    index = index[:, :, :most].sort(-1).values if ordered else index[:, :, :most]
    count = torch.tensor(listed, dtype=torch.int32, device="cuda")[:, None].expand(-1, sets).contiguous()
    return index.int().contiguous(), count


@pytest.mark.parametrize(
    ("heads", "groups", "end", "sets", "page", "listed", "ordered", "dtype"),
    [
        ((32, 8, 128), (40,), (150,), 8, 1, (500,), True, torch.bfloat16),
        ((32, 8, 128), (33, 7, 0, 16), (130, 200, 90, 1), 8, 1, (300, 896, 77, 0), False, torch.bfloat16),
        ((14, 2, 64), (50, 3), (20, 128), 1, 1, (200, 384), True, torch.float16),
        ((32, 8, 128), (40, 12), (60, 3), 8, 16, (60, 96), True, torch.bfloat16),
        ((8, 1, 128), (200,), (140,), 1, 32, (800,), False, torch.bfloat16),
        ((4, 4, 128), tuple(range(1, 41)), (10,) * 40, 4, 1, tuple(range(40)), True, torch.bfloat16),
    ],
)
def test_against_the_reference(
    heads: tuple[int, int, int],
    groups: tuple[int, ...],
    end: tuple[int, ...],
    sets: int,
    page: int,
    listed: tuple[int, ...],
    ordered: bool,
    dtype: torch.dtype,
) -> None:
    """Tokens and pages, a set per KV head or one for all, in any order; what lies beyond a row's groups is skipped."""
    q_heads, kv_heads, head_dim = heads
    batch, capacity = len(groups), max(groups) + 1
    generator = torch.Generator("cuda").manual_seed(sum(groups))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    codes = QuantizedKV.allocate(batch, kv_heads, capacity, 128, head_dim, "cuda", lower=False)
    zero = torch.zeros(batch, dtype=torch.int32, device="cuda")
    stored = random(2, batch, kv_heads, capacity * 128, head_dim)
    quantize(stored[0] + 2, stored[1], codes, zero)
    planes = DraftPlanes.allocate(codes)
    pack_draft_planes(codes, planes, zero, capacity)
    q, (keys, values) = 3 * random(batch, 1, q_heads, head_dim), random(2, batch, kv_heads, max(end) + 5, head_dim)
    ends, visible = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (end, groups))
    index, count = lists(batch, sets, max(groups) * 128 // page, listed, ordered)
    assert find_index_list_kernel(q, keys, values, codes) is not None

    def run(backend: str) -> Tensor:
        exact = backend == "reference"
        inputs = [x.float() if exact else x for x in (q, keys, values)]
        rows = None if exact else planes.value_rows
        return sparse_decode_attention(
            *inputs, zero + 1, ends, index, count, codes, visible, value_rows=rows, page=page,
            backend="reference" if exact else "auto",
        )  # fmt: skip

    expected, found = run("reference"), run("auto")
    assert float((found.float() - expected).norm() / expected.norm()) < 1e-2
    assert torch.equal(run("auto"), found)
