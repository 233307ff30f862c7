"""The choice by 2-bit keys, from scores by its twin or Triton's kernels."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.selection import two_bit_logits, two_bit_scores, two_bit_top_k
from ridgeplan.kernels.selection.draft_planes import TwoBitKeys

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
    scores = two_bit_scores(q, keys, groups, backend="reference")
    index, count = two_bit_top_k(q, keys, groups, k, max_k=64, sinks=3, backend=backend)
    assert index.shape == (3, 2, 64)
    assert count.tolist() == [[10, 10], [32, 32], [0, 0]]
    for b, tokens in enumerate((128, 32)):
        for h in range(2):
            ranked = sorted(range(tokens), key=lambda n: (n >= 3, -float(scores[b, h, n])))
            wanted = int(count[b, h])
            assert index[b, h, :wanted].tolist() == sorted(ranked[:wanted])


@BACKENDS
def test_what_is_common_to_all_keys_changes_no_choice(backend: Backend, device: str) -> None:
    """Logits of hundreds, as biases of keys cause them, are far beyond what exp holds."""
    keys = random_keys(1, 2, 12, device)
    q = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(5)).to(device)
    groups, k = integers([12], device), integers([40], device)
    moved = TwoBitKeys(keys.codes, keys.scale, keys.minimum + 32 * q[:, 0].sum(1)[:, None, None].half())
    assert two_bit_logits(q, moved, 64**-0.5).abs().max() > 300
    index, expected = (two_bit_top_k(q, x, groups, k, max_k=40, backend=backend)[0] for x in (moved, keys))
    agreeing = (index[..., None] == expected[..., None, :]).any(-1).float().mean()
    assert agreeing > 0.9  # minima are rounded to half precision


def test_what_is_not_allowed(device: str) -> None:
    keys, q = random_keys(2, 1, 2, device), torch.zeros(2, 1, 2, 64, device=device)
    groups = integers([2, 2], device)
    with pytest.raises(ValueError, match="k is"):
        two_bit_top_k(q, keys, groups, groups.long(), max_k=9)
    with pytest.raises(ValueError, match="max_k is 0; allowed: from 1"):
        two_bit_top_k(q, keys, groups, groups, max_k=0)
