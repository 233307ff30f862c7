"""Quest's bounds: never below a key's true product, tight for single tokens."""

import pytest
import torch

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.selection import page_bounds, page_scores

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("kv_heads", "ratio", "head_dim", "page"), [(2, 4, 64, 16), (1, 7, 128, 4), (3, 1, 32, 1)])
def test_bounds_hold(kv_heads: int, ratio: int, head_dim: int, page: int, backend: Backend, device: str) -> None:
    generator = torch.Generator().manual_seed(page)
    keys = torch.randn(2, kv_heads, 11 * page, head_dim, generator=generator).to(device)
    q = torch.randn(2, 1, kv_heads * ratio, head_dim, generator=generator).to(device)
    count = torch.tensor([11, 5], dtype=torch.int32, device=device)
    bounds = page_bounds(keys, page)
    assert bounds.shape == (2, kv_heads, 11, 2, head_dim)
    scores = page_scores(q, bounds, count, backend=backend)
    products = (q[:, 0].unflatten(1, (kv_heads, ratio)) @ keys.mT).amax(2).unflatten(2, (11, page)).amax(3)
    for b, pages in enumerate(count.tolist()):
        above = scores[b, :, :pages] - products[b, :, :pages]
        assert (above > -1e-4).all()
        assert page > 1 or above.abs().max() < 1e-4  # a single key is its own bounds


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_by_hand(backend: Backend, device: str) -> None:
    """Channel 0 has keys in [-1, 2], all others are 0: a query of 3 is bounded by 6, one of -3 by 3."""
    keys = torch.zeros(1, 1, 4, 32, device=device)
    keys[0, 0, 0, 0], keys[0, 0, 3, 0] = -1, 2
    for value, expected in ((3.0, 6.0), (-3.0, 3.0)):
        q = torch.zeros(1, 1, 1, 32, device=device)
        q[..., 0] = value
        scores = page_scores(q, page_bounds(keys, 4), torch.ones(1, dtype=torch.int32, device=device), backend=backend)
        assert scores.tolist() == [[[expected]]]


def test_what_is_not_allowed() -> None:
    with pytest.raises(ValueError, match="whole pages of 4"):
        page_bounds(torch.zeros(1, 1, 6, 32), 4)
    with pytest.raises(ValueError, match="one query"):
        page_scores(torch.zeros(1, 2, 4, 32), torch.zeros(1, 2, 3, 2, 32), torch.zeros(1, dtype=torch.int32))
