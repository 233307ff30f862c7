"""Decode attention over latent rows, against its definition in float64."""

import pytest
import torch

from ridgeplan.kernels.latent import latent_attention, latent_attention_cost
from ridgeplan.roofline import ops

pytestmark = pytest.mark.usefixtures("poisoned_empty")
LATENT, ROPE, SCALE = 32, 8, 0.2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_queries_see_one_token_more(backend: str, dtype: torch.dtype, device: str) -> None:
    """Rows of one and of several hundred tokens, two queries of 5 heads; several splits."""
    q, rows = (each.to(device, dtype) for each in (drawn(2, 2, 5, LATENT + ROPE), drawn(2, 700, LATENT + ROPE)))
    begin, end = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([3, 0], [4, 690]))
    out = latent_attention(q, rows, begin, end, LATENT, SCALE, backend=backend)
    assert out.shape == (2, 2, 5, LATENT) and out.dtype == dtype
    for row, (first, last) in enumerate(((3, 4), (0, 690))):
        for query in range(2):
            text = rows[row, first : last + query].double()
            weights = (q[row, query].double() @ text.T * SCALE).softmax(-1)
            expected = weights @ text[:, :LATENT]
            error = (out[row, query].double() - expected).norm() / expected.norm()
            assert float(error) < (2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_cost_and_refusals() -> None:
    q, rows, ends = torch.empty(1, 1, 4, 40), torch.empty(1, 9, 40), torch.ones(1, dtype=torch.int32)
    cost = latent_attention_cost(q, 100, LATENT, 2)
    assert cost.flops == 2 * 4 * (40 + LATENT) * 100 + ops.merge(1, 1, 4, LATENT, 2, 4).flops
    assert cost.read_bytes == 4 * (100 * 40 + 4 * 40) + ops.merge(1, 1, 4, LATENT, 2, 4).read_bytes
    with pytest.raises(ValueError, match=r"does not fit rows \[1, 9, 40\] with latents of 40"):
        latent_attention(q, rows, ends, ends, 40, 1.0)
    with pytest.raises(ValueError, match=r"begin \[2\]"):
        latent_attention(q, rows, torch.ones(2, dtype=torch.int32), ends, 32, 1.0)
