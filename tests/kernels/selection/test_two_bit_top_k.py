"""The choice by 2-bit keys, from scores by its twin or Triton's kernels."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.selection.two_bit import two_bit_scores
from ridgeplan.kernels.selection.two_bit_keys import TwoBitKeys
from ridgeplan.kernels.selection.two_bit_top_k import two_bit_top_k

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def random_keys(batch: int, kv_heads: int, groups: int, device: str, head_dim: int = 64) -> TwoBitKeys:
    """Random codes in groups of 32, whose scales differ by channel."""
    generator = torch.Generator().manual_seed(groups)
    sizes = (batch, kv_heads, groups)
    codes = torch.randint(0, 256, (*sizes, 32, head_dim // 4), generator=generator, dtype=torch.uint8)
    scale, minimum = (torch.randn(*sizes, head_dim, generator=generator).half() for _ in range(2))
    return TwoBitKeys(*(x.to(device) for x in (codes, scale.abs(), minimum)))


def integers(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@BACKENDS
def test_the_best_of_each_rows_own_groups_in_order(backend: Backend, device: str) -> None:
    """As a sort of the scores has them, sinks before all; a row of fewer tokens than k lists what it has."""
    keys = random_keys(3, 2, 4, device)
    q = torch.randn(3, 1, 4, 64, generator=torch.Generator().manual_seed(5)).to(device)
    groups, k = integers([4, 1, 0], device), integers([10, 40, 5], device)
    lse = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(6)).to(device)
    scores = two_bit_scores(q, keys, groups, lse[0].clone(), backend="reference")
    index, count = two_bit_top_k(q, keys, groups, k, lse, max_k=64, sinks=3, backend=backend)
    assert index.shape == (3, 2, 64)
    assert count.tolist() == [[10, 10], [32, 32], [0, 0]]
    for b, tokens in enumerate((128, 32)):
        for h in range(2):
            ranked = sorted(range(tokens), key=lambda n: (n >= 3, -float(scores[b, h, n])))
            wanted = int(count[b, h])
            assert index[b, h, :wanted].tolist() == sorted(ranked[:wanted])


@BACKENDS
def test_each_position_takes_the_log_sum_exps_of_the_one_before(backend: Backend, device: str) -> None:
    """With three places: positions 7 and 9 of two rows read places 0 and 2, and write 1 and 0. Others stay."""
    keys = random_keys(2, 1, 2, device)
    q = torch.randn(2, 1, 2, 64, generator=torch.Generator().manual_seed(5)).to(device)
    groups, k = integers([2, 2], device), integers([9, 9], device)
    lse = torch.arange(12.0, device=device).view(3, 2, 2)
    before = lse.clone()
    index, _ = two_bit_top_k(q, keys, groups, k, lse, max_k=9, positions=integers([7, 9], device), backend=backend)
    own = torch.stack([before[0, 0], before[2, 1]])
    scores = two_bit_scores(q, keys, groups, own, backend="reference")
    assert torch.equal(index.long(), scores.topk(9).indices.sort(-1).values)
    expected = before.clone()
    expected[1, 0], expected[0, 1] = own
    assert torch.allclose(lse, expected, atol=1e-4)


def test_what_is_not_allowed(device: str) -> None:
    keys, q = random_keys(2, 1, 2, device), torch.zeros(2, 1, 2, 64, device=device)
    groups, lse = integers([2, 2], device), torch.zeros(1, 2, 2, device=device)
    with pytest.raises(ValueError, match="k is"):
        two_bit_top_k(q, keys, groups, groups.long(), lse, max_k=9)
    with pytest.raises(ValueError, match="positions is"):
        two_bit_top_k(q, keys, groups, groups, lse, max_k=9, positions=groups[:1])
    with pytest.raises(ValueError, match="lse is"):
        two_bit_top_k(q, keys, groups, groups, lse[0], max_k=9)
