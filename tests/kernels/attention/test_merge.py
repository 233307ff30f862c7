"""The log-sum-exp merge against softmax over everything at once."""

import pytest
import torch

from ridgeplan.kernels.attention import merge

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_merge_equals_unsplit_softmax(backend: str, splits: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(splits)
    scores = 5 * torch.randn(2, 3, 2, splits, 4, generator=generator)
    values = torch.randn(splits, 4, 64, generator=generator)
    partial = torch.einsum("bthsk,skd->bthsd", scores.softmax(-1), values)
    expected = torch.einsum("bthn,nd->bthd", scores.flatten(-2).softmax(-1), values.flatten(0, 1))
    out = merge(partial.to(device), scores.logsumexp(-1).to(device), dtype, backend=backend)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_empty_splits_are_never_read(backend: str, device: str) -> None:
    partial = torch.full((2, 1, 1, 5, 32), torch.nan, device=device)
    lse = torch.full((2, 1, 1, 5), -torch.inf, device=device)
    partial[0, :, :, 1], lse[0, :, :, 1] = 2.0, -300.0
    partial[0, :, :, 4], lse[0, :, :, 4] = 4.0, -300.0
    out = merge(partial, lse, torch.float32, backend=backend)
    torch.testing.assert_close(out[0], torch.full_like(out[0], 3.0))
    assert (out[1] == 0).all()
