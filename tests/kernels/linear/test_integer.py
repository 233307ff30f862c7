"""Products of integers: planes of x, schedules, and the kernel on a GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda import compiled_for, device_limits
from ridgeplan.kernels.linear.planes import LARGEST, add_rms_norm_planes, plane_views, quantize_rows
from ridgeplan.kernels.linear.schedule import (
    BESIDE_BYTES,
    INTEGER_PRODUCTS,
    RESERVED_BYTES,
    DeviceLimits,
    IntegerVariant,
    choose_quantized_schedule,
    make_integer_schedule,
    make_quantized_schedule,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))
FULL, HALF = IntegerVariant(), IntegerVariant(sm_ctas=2, early=True, stage_inputs=1024)


def parts(outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, scale and zero as `Int4Weight.pack` takes them, in groups of 128."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(16, (outputs, inputs), generator=generator)
    scale, zero = torch.randn(2, outputs, inputs // 128, generator=generator).bfloat16().float()
    return codes.to(device), scale.to(device), zero.to(device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def random_rows(rows: int, inputs: int, device: str = "cpu") -> Tensor:
    """A group of zeros, and groups of all magnitudes."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-20, 10, inputs // 128).repeat_interleave(128)
    x[0, :128] = 0
    return x.bfloat16().to(device)


def dequantize(data: Tensor, rows: int) -> Tensor:
    """The rows that planes stand for, float32 [rows, inputs]."""
    planes, pairs = (
        view.view(-1, rows, *shape) for view, shape in zip(plane_views(data), ((2, 128), (2,)), strict=True)
    )
    ordered = planes.view(-1, rows, 2, 4, 4, 2, 2, 2).permute(2, 1, 0, 4, 3, 5, 7, 6).flatten(3)
    return ((256 * ordered[0].int() + ordered[1].int()) * pairs[..., :1].transpose(0, 1)).flatten(1)


def test_planes_hold_16_bits_of_each_group() -> None:
    x = random_rows(3, 640)
    planes = quantize_rows(x)
    largest = x.float().view(3, 5, 128).abs().amax(2, keepdim=True)
    error = (dequantize(planes, 3) - x.float()).view(3, 5, 128).abs()
    assert (error <= largest * 0.501 / LARGEST).all()
    signed, pairs = plane_views(planes)
    sums = (signed.view(5, 3, 2, 128).long().sum(3) * torch.tensor([256, 1])).sum(2)
    assert torch.equal(pairs.view(5, 3, 2)[:, :, 1], sums.float())


def test_planes_lie_as_the_kernel_reads_them() -> None:
    """Input 75 is 32 * 2 + 8 * 1 + 4 * 0 + 3: the last byte of word 2 * 2 + 0 of lane 1."""
    x = torch.zeros(2, 256)
    x[1, 128 + 75] = -3.0
    signed, pairs = plane_views(quantize_rows(x))
    place = torch.zeros(2, 2, 2, 4, 8, 4, dtype=torch.int8)  # group, row, plane, lane, word, byte
    place[1, 1, 0, 1, 4, 3], place[1, 1, 1, 1, 4, 3] = -127, -127
    assert torch.equal(signed, place.flatten())
    assert pairs.view(2, 2, 2)[1, 1].tolist() == pytest.approx([3.0 / LARGEST, -LARGEST])


def test_inputs_that_are_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="200 inputs; allowed: multiples of 128"):
        quantize_rows(torch.zeros(1, 200))


@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (3, 640), (17, 1152)])
@pytest.mark.parametrize("updated", [True, False])
def test_the_norm_quantizes_what_it_rounds(rows: int, hidden: int, updated: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x, update = torch.randn(2, rows, hidden, generator=generator).to(device)
    weight = torch.rand(hidden, generator=generator).to(device)
    results = [
        add_rms_norm_planes(x, update if updated else None, weight, 1e-5, backend=backend)
        for backend in ("reference", "triton")
    ]
    (total, expected), (actual_total, actual) = results
    assert torch.equal(total, actual_total)
    rounded = dequantize(expected, rows)
    assert (dequantize(actual, rows) - rounded).abs().max() <= 1.01 * rounded.abs().max() / LARGEST  # one step


@pytest.mark.parametrize("variant", [FULL, HALF], ids=["full", "half"])
def test_ctas_fit_an_sm(variant: IntegerVariant) -> None:
    for bits, rows, inputs in [(4, 1, 14336), (4, 4, 14336), (8, 1, 4096), (4, 8, 4096), (4, 3, 1152)]:
        schedule = make_integer_schedule(rows, 4096, inputs, True, False, H200, bits, variant)
        assert schedule is not None
        assert schedule.x_fits
        assert variant.sm_ctas * (schedule.shared_bytes + RESERVED_BYTES) + BESIDE_BYTES <= H200.sm_bytes
    assert make_integer_schedule(9, 4096, 4096, True, False, H200, 4, variant) is None


def test_integers_are_chosen_only_where_they_were_measured_to_be_faster() -> None:
    for bits, rows in ((4, 1), (4, 8), (8, 4)):
        shape = rows, 4096, 4096, 128, True, False, H200, bits
        chosen = choose_quantized_schedule(*shape)
        assert chosen is not None
        assert (chosen.x_planes > 0) == ((bits, rows) in INTEGER_PRODUCTS)
    grouped = 1, 4096, 4096, 64, True, False, H200, 4
    assert choose_quantized_schedule(*grouped) == make_quantized_schedule(*grouped)


def integer_product(
    x: Tensor, weight: Int4Weight | Int8Weight, bias: Tensor | None, variant: IntegerVariant, gated: bool = False
) -> Tensor:
    bits, bf16 = 4 * len(weight.planes), x.dtype == torch.bfloat16
    shape = len(x), weight.outputs, weight.inputs, bf16, gated
    schedule = make_integer_schedule(*shape, device_limits(x.device), bits, variant)
    kernel = compiled_for(schedule, x.device, "the kernel does not compile")
    assert kernel is not None
    data = quantize_rows(x) if variant.from_planes else x
    return kernel.run(data, *(plane.packed for plane in weight.planes), bias=bias)


VARIANTS = [FULL, HALF, replace(FULL, from_planes=True), replace(HALF, from_planes=True)]
PRODUCTS = [  # rows, outputs, inputs
    (1, 16, 128), (3, 23, 1152), (1, 4096, 4096), (4, 6144, 4096), (2, 4096, 14336), (4, 4100, 14336), (7, 1000, 2432),
    (8, 4096, 7168),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=["full", "half", "full planes", "half planes"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_definition(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, variant: IntegerVariant
) -> None:
    weight, bias = Int4Weight.pack(*parts(outputs, inputs, "cuda")), torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(rows, inputs, device="cuda").to(dtype) / 64 + 0.01
    actual = integer_product(x, weight, bias, variant)
    assert relative_error(actual, x.double() @ weight.dequantize(torch.float64).T + bias) < torch.finfo(dtype).eps
    assert torch.equal(actual, integer_product(x, weight, bias, variant))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=["full", "half", "full planes", "half planes"])
@pytest.mark.parametrize("rows", [1, 4])
def test_gated_and_8_bits_in_cuda(rows: int, variant: IntegerVariant) -> None:
    upper, lower = (Int4Weight.pack(*parts(9728, 1024, "cuda")) for _ in range(2))
    weight = Int8Weight(upper, lower)
    x = torch.randn(rows, 1024, device="cuda").bfloat16() / 64 + 0.01
    gate, up = (x.double() @ weight.dequantize(torch.float64).T).chunk(2, dim=1)
    actual = integer_product(x, weight, None, variant, gated=True)
    assert relative_error(actual, gate * gate.sigmoid() * up) < torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[:2], ids=["full", "half"])
@pytest.mark.parametrize("rows", [1, 4])
def test_dependent_products_wait_for_each_other(
    rows: int, variant: IntegerVariant, chained: Callable[..., None]
) -> None:
    def weight(outputs: int, inputs: int) -> Int4Weight:
        codes = torch.randint(16, (outputs, inputs), device="cuda")
        scale = torch.full((outputs, inputs // 128), 0.2 / inputs**0.5, device="cuda")
        return Int4Weight.pack(codes, scale, scale / 2)

    chained(lambda x, weight: integer_product(x, weight, None, variant), weight, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number: float) -> None:
    x = torch.ones(2, 256, device="cuda").bfloat16()
    x[1, 200] = number
    y = integer_product(x, Int4Weight.pack(*parts(16, 256, "cuda")), None, FULL)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()
