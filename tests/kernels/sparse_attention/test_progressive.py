"""Progressive attention reads what its own 2-bit scores rank first, and nothing else of the codes."""

import pytest
import torch

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.selection import two_bit_scores
from ridgeplan.kernels.selection.draft_planes import DraftPlanes, TwoBitKeys, pack_draft_planes
from ridgeplan.kernels.sparse_attention import progressive_attention, sparse_decode_attention

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(("sinks", "k"), [(0, 5), (3, 5), (0, 0), (2, 200)])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_progressive(sinks: int, k: int, backend: Backend, device: str) -> None:
    """Equal to attention over the tokens that a sort of the scores, with the sinks before all, puts first."""
    generator = torch.Generator().manual_seed(3)
    codes = QuantizedKV.allocate(2, 2, 4, 32, 64, device, lower=False)
    shape = (2, 2, 128, 64)
    old = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
    zero = torch.zeros(2, dtype=torch.int32, device=device)
    quantize(*old, codes, zero, backend="reference")
    planes = DraftPlanes.allocate(codes)
    pack_draft_planes(codes, planes, zero, 4, backend="reference")
    q = 3 * torch.randn(2, 1, 8, 64, generator=generator).to(device)
    keys, values = (torch.randn(2, 2, 20, 64, generator=generator).to(device) for _ in range(2))
    groups, end = zero + torch.tensor([4, 1], device=device).int(), zero + 11
    scores = two_bit_scores(q, TwoBitKeys.of(codes, planes), groups, backend="reference")
    index = torch.zeros(2, 2, 128, dtype=torch.int32, device=device)
    for b, tokens in enumerate((128, 32)):
        for h in range(2):
            ranked = sorted(range(tokens), key=lambda n: (n >= sinks, -float(scores[b, h, n])))
            index[b, h, : min(k, tokens)] = torch.tensor(ranked[:k], dtype=torch.int32)
    count = torch.tensor([[min(k, 128)] * 2, [min(k, 32)] * 2], dtype=torch.int32, device=device)
    expected = sparse_decode_attention(q, keys, values, zero, end, index, count, codes, groups, backend="reference")
    out = progressive_attention(
        q, keys, values, zero, end, codes, planes, groups, zero + k, max_k=128, sinks=sinks,
        backend=backend,
    )  # fmt: skip
    assert torch.allclose(out, expected, atol=1e-5)
