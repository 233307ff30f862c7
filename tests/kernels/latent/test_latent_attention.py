"""Decode attention over latent rows, against its definition in float64."""

import pytest
import torch

from ridgeplan.kernels.latent import absorb_append, absorb_append_cost, latent_attention, latent_attention_cost
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


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_appended_and_queries_absorb_the_factors(backend: str, dtype: torch.dtype, device: str) -> None:
    """11 heads of 6 channels and 8 with RoPE, two tokens of two sequences, out of one projection's output."""
    heads, plain, latent, eps = 11, 6, 24, 1e-6
    width = heads * (plain + ROPE)
    projected, factors, norm, rows = (
        each.to(device, dtype)
        for each in (drawn(2, 2, width + latent + ROPE), drawn(heads, plain, latent), drawn(latent), drawn(3, 9, 32))
    )
    queries, latents = projected.split([width, latent + ROPE], dim=-1)
    slots, before = torch.tensor([[3, 4], [8, 0]], device=device), rows.clone()
    angles = drawn(2, 2, ROPE // 2).to(device)
    tables = angles.cos(), angles.sin()
    out = absorb_append(queries, latents, tables, norm, eps, factors, rows, slots, backend=backend)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, dim=-1)
        cos, sin = (table.double()[:, :, None] for table in tables)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    split = queries.unflatten(-1, (heads, plain + ROPE))
    product = torch.einsum("bthn,hnr->bthr", split[..., :plain].double(), factors.double())
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), torch.cat([product, turned(split[..., plain:])], dim=-1), **tolerance)
    text = latents[..., :latent].double()
    normed = text * (text.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()
    expected = before.double()
    new = torch.cat([normed, turned(latents[:, :, None, latent:])[:, :, 0]], dim=-1)
    for row in range(2):
        expected[row, slots[row]] = new[row]
    torch.testing.assert_close(rows.double(), expected, **tolerance)


def test_slots_past_the_end_write_nothing(device: str) -> None:
    queries, latents, tables = drawn(2, 1, 16).to(device), drawn(2, 1, 24).to(device), 2 * (drawn(2, 1, 4).to(device),)
    rows, slots = torch.zeros(2, 4, 24, device=device), torch.tensor([[4], [1]], device=device)
    factors, norm = drawn(1, 8, 16).to(device), drawn(16).to(device)
    absorb_append(queries, latents, tables, norm, 1e-6, factors, rows, slots, backend="triton")
    assert not rows[0].any() and not rows[1, [0, 2, 3]].any() and rows[1, 1].any()


def test_appends_cost_their_product_and_their_rows() -> None:
    queries, factors = torch.empty(2, 3, 4 * (6 + ROPE)), torch.empty(4, 6, LATENT)
    tables = torch.empty(2, 3, ROPE // 2), torch.empty(2, 3, ROPE // 2)
    product, append = absorb_append_cost(queries, tables, factors)
    assert product.flops == 2 * 6 * 4 * 6 * LATENT
    assert append.write_bytes == 6 * (4 * ROPE + LATENT + ROPE) * 4
    rows, slots = torch.empty(2, 9, LATENT + ROPE), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"latents \[2, 3, 41\]"):
        absorb_append(queries, torch.empty(2, 3, 41), tables, torch.empty(LATENT), 0, factors, rows, slots)
    with pytest.raises(ValueError, match=r"slots \[2, 2\] do not fit \[2, 3\] tokens"):
        latents = torch.empty(2, 3, LATENT + ROPE)
        absorb_append(queries, latents, tables, torch.empty(LATENT), 0, factors, rows, slots[:, :2])
