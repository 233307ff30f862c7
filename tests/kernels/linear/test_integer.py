"""Products of integers: schedules, and the kernel on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear.cuda import compiled_for, device_limits
from ridgeplan.kernels.linear.schedule import (
    BESIDE_BYTES,
    RESERVED_BYTES,
    DeviceLimits,
    choose_quantized_schedule,
    make_integer_schedule,
    make_quantized_schedule,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))


def random_weight(outputs: int, inputs: int, seed: int = 0) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (outputs, inputs), generator=generator)
    scale, zero = torch.randn(2, outputs, inputs // 128, generator=generator)
    return Int4Weight.pack(codes.cuda(), scale.cuda(), zero.cuda())


def weight_of(bits: int, outputs: int, inputs: int) -> Int4Weight | Int8Weight:
    """A random weight of one plane, or of two with scales of their own."""
    upper = random_weight(outputs, inputs)
    return upper if bits == 4 else Int8Weight(upper, random_weight(outputs, inputs, seed=1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("bits", "rows", "inputs"), [(4, 1, 14336), (8, 4, 4096), (4, 3, 1152)])
def test_ctas_fit_an_sm(bits: int, rows: int, inputs: int) -> None:
    schedule = make_integer_schedule(rows, 4096, inputs, True, False, H200, bits)
    assert schedule is not None
    assert schedule.shared_bytes + RESERVED_BYTES + BESIDE_BYTES <= H200.sm_bytes
    assert schedule.x_multicast == schedule.split_k.ways == schedule.passes == 1


@pytest.mark.parametrize(("rows", "inputs"), [(5, 4096), (1, 16384)])
def test_what_registers_do_not_hold_has_no_schedule(rows: int, inputs: int) -> None:
    assert make_integer_schedule(rows, 4096, inputs, True, False, H200, 4) is None


@pytest.mark.parametrize(
    ("bits", "rows", "inputs", "group", "chosen"),
    [
        (4, 2, 14336, 128, True),
        (4, 3, 14336, 128, False),
        (4, 4, 7168, 128, True),
        (4, 4, 7296, 128, False),
        (8, 4, 14336, 128, True),
        (8, 5, 4096, 128, False),
        (4, 1, 14464, 128, False),  # of which registers do not hold x
        (8, 1, 14464, 128, False),
        (4, 1, 4096, 64, False),
    ],
)
def test_integers_are_chosen_where_they_were_measured_to_be_faster(
    bits: int, rows: int, inputs: int, group: int, chosen: bool
) -> None:
    schedule = choose_quantized_schedule(rows, 4096, inputs, group, True, False, H200, bits)
    assert schedule is not None
    assert schedule.integer == chosen
    if not chosen:
        assert schedule == make_quantized_schedule(rows, 4096, inputs, group, True, False, H200, bits)


def integer_product(
    x: Tensor, weight: Int4Weight | Int8Weight, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    bits, bf16 = 4 * len(weight.planes), x.dtype == torch.bfloat16
    schedule = make_integer_schedule(len(x), weight.outputs, weight.inputs, bf16, gated, device_limits(x.device), bits)
    kernel = compiled_for(schedule, x.device, "the kernel does not compile")
    assert kernel is not None
    return kernel.run(x, *(plane.packed for plane in weight.planes), bias=bias)


PRODUCTS = [  # bits, rows, outputs, inputs
    (4, 1, 16, 128), (4, 3, 23, 1152), (4, 1, 4096, 4096), (4, 4, 6144, 4096), (4, 2, 4096, 14336),
    (4, 4, 4100, 14336), (4, 3, 1000, 2432),
    (8, 1, 16, 128), (8, 4, 23, 1152), (8, 2, 1000, 2432), (8, 3, 4100, 14336), (8, 4, 132 * 16 + 5, 14336),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "rows", "outputs", "inputs"), PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_definition(bits: int, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = weight_of(bits, outputs, inputs), torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(rows, inputs, device="cuda").to(dtype) / 64 + 0.01
    x[:, :128] = 0
    actual = integer_product(x, weight, bias)
    expected = x.double() @ weight.dequantize(torch.float64).T + bias
    assert relative_error(actual, expected) < torch.finfo(dtype).eps
    assert torch.equal(actual, integer_product(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_element_is_exact_to_a_share_of_its_groups_largest(rows: int, dtype: torch.dtype) -> None:
    """Each output is one element, beside outliers 3000 times as large in every second group; rows, groups and scales of
    weights have magnitudes of their own."""
    outputs, groups = 1000, 19
    output, group, place = torch.arange(outputs), torch.randint(groups, (outputs,)), torch.randint(70, (outputs,))
    codes = torch.full((outputs, groups, 128), 8)  # weights of 0
    codes[output, group, place] = 9
    scale = 2.0 ** torch.randint(-8, 0, (outputs, groups))
    x = torch.randn(rows, groups, 128) * 2.0 ** torch.randint(-6, 4, (rows, groups, 1))
    x[:, ::2, 70] *= 3000
    x = x.clamp(-6e4, 6e4).to(dtype)
    weight = Int4Weight.pack(codes.flatten(1).cuda(), scale.cuda(), torch.zeros_like(scale).cuda())
    actual = integer_product(x.flatten(1).cuda(), weight).double().cpu()
    expected = x[:, group, place].double() * scale[output, group]
    share = x.double().abs().amax(-1)[:, group] * scale[output, group] / 65278
    rounding = torch.finfo(dtype).eps / 2 * (expected.abs() + torch.finfo(dtype).smallest_normal)
    assert ((actual - expected).abs() <= 1.01 * (share + rounding)).all()


@pytest.mark.gpu
def test_the_largest_numbers_count() -> None:
    """1 / x of elements above 2**126 is below the smallest normal number."""
    steps = torch.full((2, 64, 2), 2.0**-12, device="cuda")
    weight = Int4Weight.pack(torch.randint(16, (64, 256), device="cuda"), *steps)
    x = torch.randn(2, 256, device="cuda").sign() * torch.tensor([[1.5 * 2.0**126], [1.5 * 2.0**127]], device="cuda")
    actual, expected = integer_product(x.bfloat16(), weight), x.double() @ weight.dequantize(torch.float64).T
    assert relative_error(actual, expected) < torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_gated_in_cuda(bits: int, rows: int) -> None:
    weight = weight_of(bits, 9728, 1024)
    x = torch.randn(rows, 1024, device="cuda").bfloat16() / 64 + 0.01
    gate, up = (x.double() @ weight.dequantize(torch.float64).T).chunk(2, dim=1)
    actual = integer_product(x, weight, gated=True)
    assert relative_error(actual, gate * gate.sigmoid() * up) < torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "rows"), [(4, 1), (4, 4), (8, 4)])
def test_dependent_products_wait_for_each_other(bits: int, rows: int, chained: Callable[..., None]) -> None:
    def weight(outputs: int, inputs: int) -> Int4Weight | Int8Weight:
        codes = torch.randint(1 << bits, (outputs, inputs), device="cuda")
        scale = torch.full((outputs, inputs // 128), 3.2 / (1 << bits) / inputs**0.5, device="cuda")
        return (Int4Weight if bits == 4 else Int8Weight).pack(codes, scale, scale / 2)

    chained(integer_product, weight, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number: float) -> None:
    x = torch.ones(2, 256, device="cuda").bfloat16()
    x[1, 200] = number
    y = integer_product(x, random_weight(16, 256))
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()
