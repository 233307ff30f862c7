"""The k largest scores of each row: exact, deterministic, with ties to the lower number."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.selection import page_bounds, page_scores, top_k

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def chosen(scores: Tensor, lengths: Tensor, k: Tensor, max_k: int, backend: Backend) -> list[list[int]]:
    index, count = top_k(scores, lengths, k, max_k, backend=backend)
    assert index.shape == (len(scores), max_k) and index.dtype == count.dtype == torch.int32
    return [row[:n].tolist() for row, n in zip(index, count.tolist(), strict=True)]


@BACKENDS
def test_by_hand(backend: Backend, device: str) -> None:
    """Ties go to the lower number; what lies beyond a row's length is never chosen, however large."""
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 9.0], [-1.0, -1.0, -1.0, -2.0, 5.0]], device=device)
    index = chosen(scores, ints(4, 4, device=device), ints(2, 2, device=device), 3, backend)
    assert index == [[1, 3], [0, 1]]


@BACKENDS
def test_counts(backend: Backend, device: str) -> None:
    """As many as asked for, as there are, and as there is room for; none of an empty row."""
    scores = torch.arange(8, dtype=torch.float32, device=device).expand(5, -1).contiguous()
    index = chosen(scores, ints(8, 3, 8, 0, 8, device=device), ints(2, 5, 7, 3, 0, device=device), 4, backend)
    assert index == [[6, 7], [0, 1, 2], [4, 5, 6, 7], [], []]


@BACKENDS
def test_infinities_zeros_and_nan(backend: Backend, device: str) -> None:
    """inf first, then 0 and -0 as equals, -inf and NaN last, and a score of -inf before what lies beyond the row."""
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[nan, -inf, -0.0, inf, 0.0, -1.0, inf, 8.0]], device=device)
    for k, expected in (
        (2, [3, 6]),
        (3, [2, 3, 6]),
        (4, [2, 3, 4, 6]),
        (5, [2, 3, 4, 5, 6]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
    ):
        assert chosen(scores, ints(7, device=device), ints(k, device=device), 8, backend) == [expected]


@pytest.mark.parametrize(("width", "spread"), [(1, 1.0), (100, 1e-6), (100, 1e30), (5000, 1.0)])
def test_triton_against_a_sort(width: int, spread: float, device: str) -> None:
    """Random scores with many equal ones, ragged rows, several programs per row."""
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(3, width, generator=generator).mul(8).round().div(8).mul(spread).to(device)
    lengths = ints(width, max(1, width // 3), width - 1, device=device)
    k = ints(width // 10 + 1, 7, width, device=device)
    expected = chosen(scores, lengths, k, width, "reference")
    assert chosen(scores, lengths, k, width, "triton") == expected
    for row, n, count, index in zip(scores.tolist(), lengths.tolist(), k.tolist(), expected, strict=True):
        order = sorted(range(n), key=lambda i: (-row[i], i))
        assert index == sorted(order[:count])


def test_what_is_not_allowed() -> None:
    scores, length = torch.zeros(1, 4), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="float64"):
        top_k(scores.double(), length, length, 1)
    with pytest.raises(ValueError, match="max_k 0"):
        top_k(scores, length, length, 0)
    with pytest.raises(ValueError, match="lengths"):
        top_k(scores, length.long(), length, 1)


# Quest's bounds: never below a key's true product, tight for single tokens.


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
def test_page_bounds_by_hand(backend: Backend, device: str) -> None:
    """Channel 0 has keys in [-1, 2], all others are 0: a query of 3 is bounded by 6, one of -3 by 3."""
    keys = torch.zeros(1, 1, 4, 32, device=device)
    keys[0, 0, 0, 0], keys[0, 0, 3, 0] = -1, 2
    for value, expected in ((3.0, 6.0), (-3.0, 3.0)):
        q = torch.zeros(1, 1, 1, 32, device=device)
        q[..., 0] = value
        scores = page_scores(q, page_bounds(keys, 4), torch.ones(1, dtype=torch.int32, device=device), backend=backend)
        assert scores.tolist() == [[[expected]]]


def test_page_bounds_refuse() -> None:
    with pytest.raises(ValueError, match="whole pages of 4"):
        page_bounds(torch.zeros(1, 1, 6, 32), 4)
    with pytest.raises(ValueError, match="one query"):
        page_scores(torch.zeros(1, 2, 4, 32), torch.zeros(1, 2, 3, 2, 32), torch.zeros(1, dtype=torch.int32))


def test_a_page_scores_what_its_keenest_query_head_does() -> None:
    """Quest chooses a page if any of a KV head's query heads wants it, which a mean would hide."""
    bounds = torch.zeros(1, 1, 3, 2, 4)
    bounds[..., 0, :, 0] = 10  # wanted by one head alone, and very much
    bounds[..., 1, :, 1] = 4  # wanted by all heads a little
    q = torch.zeros(1, 1, 4, 4)
    q[0, 0, 0, 0], q[0, 0, :, 1] = 1, 1
    scores = page_scores(q, bounds, torch.tensor([3], dtype=torch.int32), backend="reference")
    assert scores.tolist() == [[[10.0, 4.0, 0.0]]]
