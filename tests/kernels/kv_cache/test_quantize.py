"""Quantization and its way back: kernels against their references, and what is refused."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeplan.kernels.device.backend import Backend
from ridgeplan.kernels.kv_cache import append_to_pages, dequantize, quantize, quantize_to_pages
from ridgeplan.kernels.kv_cache.cuda import QuantizedPlanes, QuantizeKernel, find_quantize_kernel
from ridgeplan.kernels.kv_cache.layout import GroupWrite, QuantizedKV
from ridgeplan.kernels.kv_cache.reference import encode, pack, unpack

POISON = 171


def poisoned_codes(
    batch: int, kv_heads: int, groups: int, group: int, head_dim: int, device: str, lower: bool = True
) -> QuantizedKV:
    codes = QuantizedKV.allocate(batch, kv_heads, groups, group, head_dim, device, lower)
    for tensor in tensors(codes).values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else POISON)
    return codes


def tensors(codes: QuantizedKV) -> dict[str, Tensor]:
    every = {field.name: getattr(codes, field.name) for field in fields(codes)}
    return {name: tensor for name, tensor in every.items() if tensor is not None}


def random_kv(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    keys, values = torch.randn(2, *shape, generator=generator)
    keys *= torch.logspace(-2, 1, shape[-1])  # channels of very different ranges, as keys have
    return keys.to(device, dtype), values.to(device, dtype)


def first_groups(batch: int, device: str) -> Tensor:
    return torch.zeros(batch, dtype=torch.int32, device=device)


CASES = [
    pytest.param(group, head_dim, dtype, lower, id=f"g{group}-d{head_dim}-{str(dtype)[6:]}-{planes}")
    for group, head_dim, dtype, lower, planes in [
        (128, 128, torch.bfloat16, True, "both"),
        (128, 64, torch.float32, True, "both"),
        (64, 64, torch.float16, False, "upper"),
        (32, 128, torch.float32, False, "upper"),
        (32, 32, torch.bfloat16, True, "both"),
    ]
]


@pytest.mark.parametrize(("group", "head_dim", "dtype", "lower"), CASES)
def test_kernel_equals_reference_bit_by_bit(
    group: int, head_dim: int, dtype: torch.dtype, lower: bool, device: str
) -> None:
    """Ragged group indices, a masked row and strided inputs: the same bytes, nothing else touched."""
    batch, kv_heads, groups = 3, 2, 4
    buffer_keys, buffer_values = random_kv((batch, kv_heads, 3 * group + 5, head_dim), dtype, device)
    buffer_keys[:, :, :, 3] = 1.5  # a constant channel
    buffer_values[:, :, 7:9] = -2.0  # and constant tokens
    keys, values = buffer_keys[:, :, 5 : 5 + 2 * group], buffer_values[:, :, 5 : 5 + 2 * group]
    index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    mask = torch.tensor([True, False, True], device=device)
    results = {}
    for backend in ("reference", "triton"):
        codes = poisoned_codes(batch, kv_heads, groups, group, head_dim, device, lower)
        quantize(keys, values, codes, index, mask, backend=backend)
        results[backend] = tensors(codes)
    for name, tensor in results["reference"].items():
        assert torch.equal(tensor.nan_to_num(-7.0), results["triton"][name].nan_to_num(-7.0)), name
        untouched = torch.stack([tensor[0, :, 0], tensor[0, :, 1], tensor[1, :, 0], tensor[2, :, 3]])
        assert (untouched.isnan() if tensor.is_floating_point() else untouched == POISON).all(), name
        assert not torch.isnan(tensor[2, :, 1:3]).any(), name


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("lower", [False, True], ids=["int4", "int8"])
@pytest.mark.parametrize(("group", "head_dim"), [(128, 64), (32, 128), (32, 32)])
def test_dequantize_kernel_equals_reference(group: int, head_dim: int, lower: bool, device: str) -> None:
    keys, values = random_kv((2, 3, 2 * group, head_dim), torch.float32, device)
    codes = poisoned_codes(2, 3, 2, group, head_dim, device)
    quantize(keys, values, codes, first_groups(2, device), backend="reference")
    output = dequantize(codes, lower, backend="triton")
    for decoded, expected in zip(output, dequantize(codes, lower, backend="reference"), strict=True):
        torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-5)
    halved = dequantize(codes, lower, torch.bfloat16, backend="triton")
    for decoded, full in zip(halved, output, strict=True):
        # The interpreter truncates to bf16 where the GPU rounds: one unit in the last place.
        torch.testing.assert_close(decoded.float(), full, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_row_flushes(backend: str, device: str) -> None:
    keys, values = random_kv((2, 1, 32, 32), torch.float32, device)
    codes = poisoned_codes(2, 1, 1, 32, 32, device)
    none = torch.zeros(2, dtype=torch.bool, device=device)
    quantize(keys, values, codes, first_groups(2, device), none, backend=backend)
    assert codes.key_scale.isnan().all() and (codes.value_upper == POISON).all()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_token_major_buffers(backend: str, device: str) -> None:
    """[B, tokens, Hkv, D] storage seen as [B, Hkv, tokens, D] quantizes like a contiguous copy."""
    keys, values = random_kv((2, 64, 3, 32), torch.float32, device)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    strided, plain = (poisoned_codes(2, 3, 2, 32, 32, device) for _ in range(2))
    quantize(keys, values, strided, first_groups(2, device), backend=backend)
    quantize(keys.contiguous(), values.contiguous(), plain, first_groups(2, device), backend="reference")
    for name, tensor in tensors(plain).items():
        assert torch.equal(tensor, tensors(strided)[name]), name


@pytest.mark.parametrize("backend", ["reference", "triton", "auto"])
def test_keys_alone_have_the_codes_that_keys_beside_values_have(backend: str, device: str) -> None:
    """Latents of 256 channels seen as two heads, as the cache passes them; "auto" is CUDA C++ on Hopper."""
    latents, _ = random_kv((2, 300, 256), torch.bfloat16, device)
    heads = latents.unflatten(-1, (2, 128)).transpose(1, 2)
    slots, mask = (torch.tensor(each, device=device) for each in ([8, 172], [True, True]))
    key_codes = QuantizedKV.allocate(2, 2, 3, 128, 128, device, lower=True, values=False)
    both = QuantizedKV.allocate(2, 2, 3, 128, 128, device, lower=True)
    index = torch.tensor([2, 0], dtype=torch.int32, device=device)
    quantize(heads, None, key_codes, index, mask, first_slot=slots.int(), backend=backend)
    quantize(heads, heads, both, index, mask, first_slot=slots.int(), backend="reference")
    assert all(torch.equal(x, y) for x, y in zip(key_codes.key_planes, both.key_planes, strict=True))
    assert key_codes.bytes == sum(x.nbytes for x in both.key_planes) and not key_codes.has_values
    with pytest.raises(ValueError, match="values are given"):
        quantize(heads, heads, key_codes, index)
    with pytest.raises(ValueError, match="values are missing"):
        quantize(heads, None, both, index)
    with pytest.raises(ValueError, match="codes are of keys alone"):
        dequantize(key_codes, lower=True)


@pytest.mark.parametrize("masked", [False, True], ids=["every row", "one row"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_group_anywhere_in_a_store(backend: str, masked: bool, device: str) -> None:
    """One group of each row from its own slot; masked rows may point past the end."""
    keys, values = random_kv((2, 3, 75, 32), torch.float32, device)
    slots = torch.tensor([70 if masked else 9, 41], dtype=torch.int32, device=device)
    mask = torch.tensor([False, True], device=device) if masked else None
    codes, expected = (poisoned_codes(2, 3, 2, 32, 32, device) for _ in range(2))
    index = torch.tensor([0, 1], dtype=torch.int32, device=device)
    quantize(keys, values, codes, index, mask, first_slot=slots, backend=backend)
    oldest = [torch.stack([row[:, at : at + 32] for row, at in zip(x, (9, 41), strict=True)]) for x in (keys, values)]
    quantize(*oldest, expected, index, mask, backend="reference")
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensor.nan_to_num(-7.0), tensors(codes)[name].nan_to_num(-7.0)), name


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_groups_go_to_their_pages(backend: Backend, device: str) -> None:
    keys, values = random_kv((2, 3, 64, 32), torch.float32, device)
    paged = poisoned_codes(5, 3, 1, 32, 32, device)
    expected = poisoned_codes(2, 3, 2, 32, 32, device)
    pages = torch.tensor([[4, 0], [-1, 2]], dtype=torch.int32, device=device)
    quantize_to_pages(keys, values, paged, pages, backend=backend)
    quantize(keys, values, expected, first_groups(2, device), backend="reference")
    for name, tensor in tensors(paged).items():
        want = tensors(expected)[name].transpose(1, 2).flatten(0, 1)
        assert torch.equal(tensor[[4, 0, 2], :, 0], want[[0, 1, 3]]), name
        untouched = tensor[[1, 3]]
        assert (untouched.isnan() if tensor.is_floating_point() else untouched == POISON).all(), name


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_tokens_go_to_open_pages_and_full_ones_become_codes(backend: Backend, device: str) -> None:
    stores = [x.contiguous() for x in random_kv((4, 3, 32, 32), torch.float32, device)]
    before = [store.clone() for store in stores]
    keys, values = random_kv((5, 3, 32), torch.float32, device)
    slots = torch.tensor([2 * 32 + 31, -1, 7, 3 * 32 + 31, 32], dtype=torch.int32, device=device)
    pages = torch.tensor([4, 3, -1, 1, -1], dtype=torch.int32, device=device)
    paged, expected = (poisoned_codes(6, 3, 1, 32, 32, device) for _ in range(2))
    append_to_pages(keys, values, *stores, paged, slots, pages, backend=backend)
    for store, old, tokens in zip(stores, before, (keys, values), strict=True):
        for token, (buffer, place) in {0: (2, 31), 2: (0, 7), 3: (3, 31), 4: (1, 0)}.items():
            old[buffer, :, place] = tokens[token]
        assert torch.equal(store, old)
    closed = torch.tensor([[4], [1]], dtype=torch.int32, device=device)
    quantize_to_pages(*(store[2:] for store in before), expected, closed, backend="reference")
    for name, tensor in tensors(paged).items():
        assert torch.equal(tensor.nan_to_num(-7.0), tensors(expected)[name].nan_to_num(-7.0)), name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_cuda_kernel_writes_pages_as_the_reference_does(head_dim: int) -> None:
    keys, values = random_kv((3, 256, 2, head_dim), torch.bfloat16, "cuda")
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    cuda, reference = (poisoned_codes(9, 2, 1, 128, head_dim, "cuda") for _ in range(2))
    pages = torch.tensor([[8, 0], [-1, 5], [3, -1]], dtype=torch.int32, device="cuda")
    quantize_to_pages(keys, values, cuda, pages)
    quantize_to_pages(keys, values, reference, pages, backend="reference")
    for name, tensor in tensors(cuda).items():
        assert torch.equal(tensor.nan_to_num(-7.0), tensors(reference)[name].nan_to_num(-7.0)), name


def test_pages_that_do_not_fit_are_refused() -> None:
    keys = torch.zeros(2, 3, 64, 32)
    pages = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages torch.int32 \[2, 1\] do not fit 64 tokens in groups of 32"):
        quantize_to_pages(keys, keys, poisoned_codes(5, 3, 1, 32, 32, "cpu"), pages[:, :1])
    with pytest.raises(ValueError, match="do not fit pages of 2 groups, 3 KV heads and head_dim 32"):
        quantize_to_pages(keys, keys, poisoned_codes(5, 3, 2, 32, 32, "cpu"), pages)
    codes, token, rows = poisoned_codes(5, 3, 1, 32, 32, "cpu"), torch.zeros(4, 3, 32), pages.flatten()
    store = torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match="do not fit buffers"):
        append_to_pages(token, token, store[:, :2], store[:, :2], codes, rows, rows)
    with pytest.raises(ValueError, match="must be contiguous, of one shape"):
        append_to_pages(token, token, store, store.transpose(0, 1).contiguous().transpose(0, 1), codes, rows, rows)
    with pytest.raises(ValueError, match=r"slots is torch\.int64"):
        append_to_pages(token, token, store, store, codes, rows.long(), rows)


def test_kernel_ignores_groups_past_the_end(device: str) -> None:
    """The index is only known on the device: writing past a row must not reach the next one."""
    keys, values = random_kv((2, 1, 64, 32), torch.float32, device)
    codes = poisoned_codes(2, 1, 2, 32, 32, device)
    index = torch.tensor([1, 2], dtype=torch.int32, device=device)
    quantize(keys, values, codes, index, backend="triton")
    assert not codes.key_scale[0, :, 1].isnan().any()
    assert codes.key_scale[0, :, 0].isnan().all() and codes.key_scale[1].isnan().all()


def test_errors_name_the_value() -> None:
    codes = QuantizedKV.allocate(1, 1, 1, 32, 32, "cpu", lower=False)
    x = torch.zeros(1, 1, 40, 32)
    with pytest.raises(ValueError, match="40 tokens are not whole groups of 32"):
        quantize(x, x, codes, first_groups(1, "cpu"))
    with pytest.raises(ValueError, match="do not fit codes of batch 1, 1 KV heads"):
        quantize(x.expand(1, 2, 40, 32), x.expand(1, 2, 40, 32), codes, first_groups(1, "cpu"))
    full, first = x[:, :, :32], first_groups(1, "cpu")
    with pytest.raises(ValueError, match="must have one shape"):
        quantize(x, full, codes, first)
    with pytest.raises(ValueError, match="contiguous channels"):
        quantize(full.mT, full.mT, codes, first)
    with pytest.raises(ValueError, match=r"group_index is torch.int64 \[1\] on cpu; allowed: torch.int32 \[1\] on cpu"):
        quantize(full, full, codes, first.long())
    with pytest.raises(ValueError, match=r"first_slot is torch.int32 \[2\] on cpu; allowed: torch.int32 \[1\]"):
        quantize(full, full, codes, first, first_slot=first.repeat(2))
    with pytest.raises(ValueError, match=r"mask is torch.uint8 \[1\] on cpu; allowed: torch.bool \[1\]"):
        quantize(full, full, codes, first, first.byte())
    with pytest.raises(ValueError, match=r"group_index is torch.int32 \[1\] on meta; allowed: .* on cpu"):
        quantize(full, full, codes, first.to("meta"))
    with pytest.raises(ValueError, match="give both planes or neither"):
        replace(codes, key_lower=codes.key_upper)
    with pytest.raises(ValueError, match="upper plane only"):
        dequantize(codes, lower=True)
    with pytest.raises(ValueError, match="none of: auto, triton, reference"):
        quantize(x[:, :, :32], x[:, :, :32], codes, first_groups(1, "cpu"), backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="even"):
        QuantizedKV.allocate(1, 1, 1, 33, 32, "cpu", lower=False)
    with pytest.raises(ValueError, match="key_upper of a QuantizedKV must be contiguous"):
        QuantizedKV(
            **{
                name: t.transpose(1, 2)
                for name, t in tensors(QuantizedKV.allocate(1, 2, 2, 32, 32, "cpu", lower=True)).items()
            }
        )


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    codes = QuantizedKV.allocate(1, 1, 1, 32, 32, "cpu", lower=False)
    x = torch.zeros(1, 1, 32, 32)
    with pytest.raises(ValueError, match="needs a CUDA tensor or TRITON_INTERPRET=1"):
        quantize(x, x, codes, first_groups(1, "cpu"), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiled_kernels_equal_the_cpu_reference_at_real_size(
    backend: str, head_dim: int, dtype: torch.dtype, lower: bool
) -> None:
    """Strided, masked rows, bit by bit; "auto" is the CUDA C++ kernel on Hopper."""
    keys, values = random_kv((2, 8, 2048 + 16, head_dim), dtype, "cuda")
    keys[:, :, :, 3], values[:, :, 40:50] = 1.5, -2.0
    keys[1, :, 128:256] += 3e3  # where the rounded minimum is far off, codes clamp
    keys, values = keys[:, :, 16:], values[:, :, 16:]
    index, mask = torch.tensor([4, 0], dtype=torch.int32), torch.tensor([True, True])
    codes = poisoned_codes(2, 8, 20, 128, head_dim, "cuda", lower)
    quantize(keys, values, codes, index.cuda(), mask.cuda(), backend=backend)
    quantize(keys, values, codes, index.cuda(), ~mask.cuda(), backend=backend)
    slots = torch.tensor([1000, 77], dtype=torch.int32)
    quantize(keys, values, codes, index.cuda() + 15, first_slot=slots.cuda(), backend=backend)
    expected = poisoned_codes(2, 8, 20, 128, head_dim, "cpu", lower)
    quantize(keys.cpu(), values.cpu(), expected, index, mask)
    quantize(keys.cpu(), values.cpu(), expected, index + 15, first_slot=slots)
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensor.nan_to_num(-7.0), tensors(codes)[name].cpu().nan_to_num(-7.0)), name


# The number format of the hierarchical cache: where codes lie, and how far what they stand for may be off.


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
    full = QuantizedKV.allocate(3, 2, 2, 8, 16, "cpu", lower=lower)
    for planes, name in (
        (QuantizedPlanes.of(full.key_planes), "key"),
        (QuantizedPlanes.of(full.value_planes), "value"),
    ):
        lower_codes = getattr(full, f"{name}_lower")
        assert planes.lower == (None if lower_codes is None else lower_codes.data_ptr())
        pointers = [planes.upper, planes.scale, planes.minimum]
        assert pointers == [getattr(full, f"{name}_{part}").data_ptr() for part in ("upper", "scale", "min")]
    part = full.rows(slice(1, 3))
    assert (part.batch, part.planes) == (2, full.planes)
    part.value_upper.fill_(7)
    assert full.value_upper[1:].eq(7).all() and full.value_upper[0].eq(0).all()


# The CUDA quantization kernel computes only what it can read, and what it is launched with.


def test_cpu_tensors_are_left_to_the_reference() -> None:
    keys = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16)
    assert find_quantize_kernel(keys, keys, QuantizedKV.allocate(1, 2, 1, 128, 64, "cpu", lower=True)) is None


@pytest.mark.parametrize("placed", [False, True], ids=["whole groups", "a group from a slot"])
def test_the_launch_passes_pointers_strides_and_sizes(placed: bool, launches: Any) -> None:
    """Strides in units of 16 bytes; null pointers for what is not there."""
    keys, values = (torch.zeros(2, 384, 3, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    out = QuantizedKV.allocate(2, 3, 7, 128, 64, "cpu", lower=not placed)
    index, slots = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    mask = None if placed else torch.ones(2, dtype=torch.bool)
    target = GroupWrite(out, index, mask, slots if placed else None)
    QuantizeKernel("quantize").run(keys, values, target)
    ((kernel, grid, threads, params, shared_bytes, early),) = launches.asked
    assert (kernel, grid, threads, shared_bytes, early) == ("quantize", (6, 1 if placed else 3, 2), 128, 0, True)
    assert (params.keys, params.values, params.group_index) == (keys.data_ptr(), values.data_ptr(), index.data_ptr())
    assert params.mask == (None if mask is None else mask.data_ptr())
    assert params.first_slot == (slots.data_ptr() if placed else None)
    assert params.key_codes.upper == out.key_upper.data_ptr()
    assert params.value_codes.minimum == out.value_min.data_ptr()
    assert (params.key_codes.lower is None) == placed
    assert (params.kv_heads, params.group_capacity) == (3, 7)
    strides = (params.key_batch_stride, params.key_head_stride, params.key_stride)
    assert strides == (384 * 3 * 64 // 8, 64 // 8, 3 * 64 // 8)
    assert strides == (params.value_batch_stride, params.value_head_stride, params.value_stride)
