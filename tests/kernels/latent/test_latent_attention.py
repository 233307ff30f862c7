"""Decode attention over latent rows, against its definition in float64."""

import pytest
import torch

from ridgeplan.kernels.kv_cache import quantize
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import dequantize_keys, encode
from ridgeplan.kernels.latent import absorb_append, absorb_append_cost, latent_attention, latent_attention_cost
from ridgeplan.kernels.latent.triton import tile_of
from ridgeplan.roofline import ops

pytestmark = pytest.mark.usefixtures("poisoned_empty")
LATENT, ROPE, SCALE = 32, 8, 0.2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def parts(rows: torch.Tensor) -> list[torch.Tensor]:
    """Latents and rotated keys of rows."""
    return [part.contiguous() for part in rows.split([LATENT, ROPE], -1)]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_queries_see_one_token_more(backend: str, dtype: torch.dtype, device: str) -> None:
    """Rows of one and of several hundred tokens, two queries of 5 heads; several splits."""
    q, rows = (each.to(device, dtype) for each in (drawn(2, 2, 5, LATENT + ROPE), drawn(2, 700, LATENT + ROPE)))
    begin, end = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([3, 0], [4, 690]))
    out = latent_attention(q, *parts(rows), begin, end, SCALE, backend=backend)
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
    cost = latent_attention_cost(q, LATENT, 0, 100, 0, 1, 2)
    assert cost.flops == 2 * 4 * (40 + LATENT) * 100 + ops.merge(1, 1, 4, LATENT, 2, 4).flops
    assert cost.read_bytes == 4 * (100 * 40 + 4 * 40) + ops.merge(1, 1, 4, LATENT, 2, 4).read_bytes
    latents, rotated = parts(rows)
    with pytest.raises(ValueError, match=r"latents \[1, 9, 40\], rotated \[1, 9, 8\]"):
        latent_attention(q, rows, rotated, ends, ends, 1.0)
    with pytest.raises(ValueError, match=r"begin \[2\]"):
        latent_attention(q, latents, rotated, torch.ones(2, dtype=torch.int32), ends, 1.0)
    codes = QuantizedKV.allocate(1, 1, 1, 32, 16, "cpu", lower=False, values=False)
    with pytest.raises(ValueError, match="codes of 1 x 16 channels do not fit latents of 32"):
        latent_attention(q, latents, rotated, ends, ends, 1.0, codes, ends)
    with pytest.raises(ValueError, match="codes of 1 rows and groups None"):
        latent_attention(q, latents, rotated, ends, ends, 1.0, codes)
    with pytest.raises(ValueError, match="holds the upper plane only"):
        latent_attention(q, latents, rotated, ends, ends, 1.0, codes, ends, lower=True)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffer", "every token"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_read_codes_and_then_recent_latents(
    buffered: bool, bits: int, backend: str, dtype: torch.dtype, device: str
) -> None:
    """Rows of no, 3 and 5 groups; recent latents lie in a buffer, or where all tokens are."""
    group, counts, ends = 32, [0, 3, 5], [7, 130, 201]
    q, text = (each.to(device, dtype) for each in (drawn(3, 2, 5, LATENT + ROPE), drawn(3, 210, LATENT + ROPE)))
    latents, rotated = parts(text)
    codes = QuantizedKV.allocate(3, 2, 6, group, LATENT // 2, device, lower=True, values=False)
    heads = latents[:, : 6 * group].unflatten(-1, (2, -1)).transpose(1, 2)
    quantize(heads, None, codes, torch.zeros(3, dtype=torch.int32, device=device), backend="reference")
    decoded = dequantize_keys(codes, bits == 8).transpose(1, 2).flatten(2)
    coded = [count * group for count in counts]
    slots = latents
    if buffered:
        slots = torch.stack([row.roll(-start, 0) for row, start in zip(latents, coded, strict=True)])
    begin, end = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in (
            [0] * 3 if buffered else coded,
            [last - start if buffered else last for last, start in zip(ends, coded, strict=True)],
        )
    )
    groups = torch.tensor(counts, dtype=torch.int32, device=device)
    out = latent_attention(q, slots, rotated, begin, end, SCALE, codes, groups, lower=bits == 8, backend=backend)
    for row, (start, last) in enumerate(zip(coded, ends, strict=True)):
        for query in range(2):
            seen = torch.cat([decoded[row, :start], latents[row, start : last + query].float()]).double()
            keys = torch.cat([seen, rotated[row, : last + query].double()], dim=-1)
            expected = (q[row, query].double() @ keys.T * SCALE).softmax(-1) @ seen
            error = (out[row, query].double() - expected).norm() / expected.norm()
            assert float(error) < (2e-2 if dtype is torch.bfloat16 else 1e-5)
    cost, plain = (latent_attention_cost(q, LATENT, *read, 2) for read in ((96, 34, bits, group), (0, 130, 0, 1)))
    assert plain.read_bytes - cost.read_bytes == 3 * 96 * LATENT * (q.element_size() - bits / 8 - 4 / group)
    assert cost.flops == plain.flops


@pytest.mark.parametrize(("spread", "by_token"), [(0.0, 0.12), (0.6, 0.30)])
def test_scales_of_channels_hold_where_channels_differ(spread: float, by_token: float) -> None:
    """Errors of INT4 scores, over their deviation, of random latents behind RMSNorm (docs/kernels/experts.md)."""
    generator = torch.Generator().manual_seed(0)
    text, widths, queries = (torch.randn(*shape, generator=generator) for shape in ((2048, 512), (512,), (64, 512)))
    text = text * (spread * widths).exp()
    text /= text.square().mean(-1, keepdim=True).sqrt()
    queries /= text.std(0).sqrt()

    def error(x: torch.Tensor, dim: int) -> float:
        upper, _, scale, minimum = encode(x, dim)
        decoded = upper * scale.float().unsqueeze(dim) + minimum.float().unsqueeze(dim)
        return float((queries @ (decoded - x).reshape(text.shape).T).std() / (queries @ text.T).std())

    assert error(text.view(-1, 128, 512), 1) == pytest.approx(0.10, abs=0.005)
    assert error(text, 1) == pytest.approx(by_token, abs=0.03)


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
    slots = torch.tensor([[3, 4], [8, 0]], device=device), torch.tensor([[5, 6], [1, 2]], device=device)
    stores = tuple(part.contiguous() for part in rows.split([latent, ROPE], dim=-1))
    before = [store.clone() for store in stores]
    angles = drawn(2, 2, ROPE // 2).to(device)
    tables = angles.cos(), angles.sin()
    out = absorb_append(queries, latents, tables, norm, eps, factors, stores, slots, backend=backend)

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
    for store, expected, places, new in zip(
        stores, before, slots, (normed, turned(latents[:, :, None, latent:])[:, :, 0]), strict=True
    ):
        for row in range(2):
            expected[row, places[row]] = new[row].to(dtype)
        torch.testing.assert_close(store, expected, **tolerance)


def test_slots_past_the_end_write_nothing(device: str) -> None:
    queries, latents, tables = drawn(2, 1, 16).to(device), drawn(2, 1, 24).to(device), 2 * (drawn(2, 1, 4).to(device),)
    stores = torch.zeros(2, 4, 16, device=device), torch.zeros(2, 4, 8, device=device)
    slots = (torch.tensor([[4], [1]], device=device),) * 2
    factors, norm = drawn(1, 8, 16).to(device), drawn(16).to(device)
    absorb_append(queries, latents, tables, norm, 1e-6, factors, stores, slots, backend="triton")
    for rows in stores:
        assert not rows[0].any() and not rows[1, [0, 2, 3]].any() and rows[1, 1].any()


def test_appends_cost_their_product_and_their_rows() -> None:
    queries, factors = torch.empty(2, 3, 4 * (6 + ROPE)), torch.empty(4, 6, LATENT)
    tables = torch.empty(2, 3, ROPE // 2), torch.empty(2, 3, ROPE // 2)
    product, append = absorb_append_cost(queries, tables, factors)
    assert product.flops == 2 * 6 * 4 * 6 * LATENT
    assert append.write_bytes == 6 * (4 * ROPE + LATENT + ROPE) * 4
    stores, slots = (torch.empty(2, 9, LATENT), torch.empty(2, 9, ROPE)), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"latents \[2, 3, 41\]"):
        latents = torch.empty(2, 3, 41)
        absorb_append(queries, latents, tables, torch.empty(LATENT), 0, factors, stores, (slots, slots))
    with pytest.raises(ValueError, match=r"slots \[\[2, 2\], \[2, 3\]\] do not fit \[2, 3\] tokens"):
        latents = torch.empty(2, 3, LATENT + ROPE)
        absorb_append(queries, latents, tables, torch.empty(LATENT), 0, factors, stores, (slots[:, :2], slots))


@pytest.mark.parametrize(
    ("shared_kib", "tiles"),
    [
        (227, [(16, 32, 3, 2), (32, 64, 3, 1), (16, 32, 3, 2)]),
        (163, [(16, 32, 2, 2)] * 3),
        (99, [(16, 32, 2, 2)] * 3),
    ],
    ids=["H200", "A100", "RTX 4090"],
)
def test_tiles_fit_the_shared_memory(shared_kib: int, tiles: list[tuple[int, ...]]) -> None:
    """Of few rows, of many, and of many over codes, at DeepSeek's 1152 bytes of a token."""
    cases = (16, False), (128, False), (128, True)
    assert [tile_of(rows, 1152, quantized, shared_kib << 10) for rows, quantized in cases] == tiles
