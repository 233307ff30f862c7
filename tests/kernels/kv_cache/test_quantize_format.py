"""The number format of the hierarchical cache: where codes lie, and how far what they stand for may be off."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeplan.kernels.kv_cache import dequantize, quantize
from ridgeplan.kernels.kv_cache.cuda import key_planes, value_planes
from ridgeplan.kernels.kv_cache.layout import QuantizedKV
from ridgeplan.kernels.kv_cache.reference import encode, pack, unpack


def test_layout_puts_halves_into_nibbles() -> None:
    """Integers 0..15 in every group are their own codes, so bytes can be written down by hand."""
    group, head_dim = 32, 64
    token, channel = torch.arange(group)[:, None], torch.arange(head_dim)[None, :]
    x = ((token * 7 + channel * 3) % 16).float()[None, None]
    codes = QuantizedKV.allocate(1, 1, 1, group, head_dim, "cpu", lower=True)
    quantize(x, x, codes, torch.zeros(1, dtype=torch.int32))
    u = x[0, 0].to(torch.uint8)
    assert torch.equal(codes.key_upper[0, 0, 0], u[:, :32] + 16 * u[:, 32:])
    assert torch.equal(codes.value_upper[0, 0, 0], (u[:16] + 16 * u[16:]).T)
    assert codes.key_lower is not None and (codes.key_lower == 0x88).all()  # residual 0 is stored as 8
    assert (codes.key_scale == 1).all() and (codes.value_min == 0).all()


def test_pack_round_trip_of_every_byte() -> None:
    nibbles = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert torch.equal(torch.stack(unpack(pack(nibbles)[:, 0], None), dim=1), nibbles.float())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spread=st.floats(1e-3, 1e3),
    offset=st.floats(-100, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_bounds(seed: int, spread: float, offset: float, dtype: torch.dtype) -> None:
    """|x - INT4| <= S/2, |x - INT8| <= S/16 (the residual clamps at 7/16), plus fp16 rounding of S and Z."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 2, 64, 32)
    x = (torch.randn(shape, generator=generator) * spread + offset).to(dtype)
    codes = QuantizedKV.allocate(1, 2, 2, 32, 32, "cpu", lower=True)
    quantize(x, x, codes, torch.zeros(1, dtype=torch.int32))
    scales = (
        codes.key_scale.float().repeat_interleave(32, dim=2).view(shape),
        codes.value_scale.float().view(1, 2, 64, 1).expand(shape),
    )
    minima = (
        codes.key_min.float().repeat_interleave(32, dim=2).view(shape),
        codes.value_min.float().view(1, 2, 64, 1).expand(shape),
    )
    for lower, fraction in ((False, 1 / 2), (True, 1 / 16)):
        for decoded, scale, minimum in zip(dequantize(codes, lower), scales, minima, strict=True):
            # fp16 keeps 11 bits: half a unit of the minimum, and 15 times half a unit of the scale; below
            # 2^-14 the unit no longer shrinks.
            rounding = (minimum.abs() + 15 * scale) * 2**-11 + 16 * 2**-25
            excess = (x.float() - decoded).abs() - (fraction * scale + rounding) * (1 + 1e-5)
            assert excess.max() <= 0


def test_lower_codes_refine_upper_codes() -> None:
    keys, values = torch.randn(2, 1, 2, 128, 64, generator=torch.Generator().manual_seed(0))
    keys *= torch.logspace(-2, 1, 64)  # channels of very different ranges, as keys have
    codes = QuantizedKV.allocate(1, 2, 1, 128, 64, "cpu", lower=True)
    quantize(keys, values, codes, torch.zeros(1, dtype=torch.int32))
    decoded = (dequantize(codes, False), dequantize(codes, True))
    for x, coarse, fine in zip((keys, values), *decoded, strict=True):
        assert (x - fine).norm() < (x - coarse).norm() / 12


@pytest.mark.parametrize("constant", [0.0, 1.0, -2.5, 1e-8, 60000.0])
def test_zero_range_decodes_to_the_minimum(constant: float) -> None:
    x = torch.full((1, 1, 32, 32), constant)
    codes = QuantizedKV.allocate(1, 1, 1, 32, 32, "cpu", lower=True)
    quantize(x, x, codes, torch.zeros(1, dtype=torch.int32))
    assert codes.key_lower is not None and codes.value_lower is not None
    assert not codes.key_upper.any() and not codes.value_upper.any()
    assert (codes.key_lower == 0x88).all() and (codes.value_lower == 0x88).all()
    for lower in (False, True):
        for decoded in dequantize(codes, lower):
            assert torch.equal(decoded, x.half().float())


def test_residual_uses_the_stored_scale() -> None:
    """A range whose scale rounds badly in fp16 must still decode within S/16 where nothing clamps."""
    x = torch.linspace(0, 15 * 1.0004, 64).view(64, 1)
    upper, lower, scale, minimum = encode(x, dim=0)
    assert scale.float().item() != pytest.approx(1.0004, abs=1e-6)
    decoded = scale.float() * (upper + (lower.float() - 8) / 16) + minimum.float()
    assert (x - decoded).abs().max() <= scale.float().item() / 16


def test_bytes_per_token() -> None:
    """QuantSpec's layout at G = D = 128: one byte an element in two planes, plus 8 bytes of pairs a token."""
    both = QuantizedKV.allocate(2, 3, 5, 128, 128, "cpu", lower=True)
    upper = QuantizedKV.allocate(2, 3, 5, 128, 128, "cpu", lower=False)
    tokens = 2 * 3 * 5 * 128
    assert both.bytes == tokens * (2 * 128 + 4 + 4)
    assert upper.bytes == tokens * (128 + 4 + 4)
    assert (both.planes, upper.planes) == (2, 1)


@pytest.mark.parametrize("lower", [True, False])
def test_kernels_and_batches_see_the_same_storage(lower: bool) -> None:
    whole = QuantizedKV.allocate(3, 2, 2, 8, 16, "cpu", lower=lower)
    for planes, name in ((key_planes(whole), "key"), (value_planes(whole), "value")):
        lower_codes = getattr(whole, f"{name}_lower")
        assert planes.lower == (None if lower_codes is None else lower_codes.data_ptr())
        pointers = [planes.upper, planes.scale, planes.minimum]
        assert pointers == [getattr(whole, f"{name}_{part}").data_ptr() for part in ("upper", "scale", "min")]
    part = whole.rows(slice(1, 3))
    assert (part.batch, part.planes) == (2, whole.planes)
    part.value_upper.fill_(7)
    assert whole.value_upper[1:].eq(7).all() and whole.value_upper[0].eq(0).all()
