"""8-bit weights and their product: two planes, reference and kernels, declared cost, CUDA's schedules."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear.cuda import LinearKernel, find_quantized_kernel
from ridgeplan.kernels.linear.schedule import (
    BESIDE_BYTES,
    MAX_GATED_ROWS,
    RESERVED_BYTES,
    DeviceLimits,
    make_quantized_schedule,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight
from ridgeplan.roofline.execution import MAX_QUANTIZED_ROWS
from ridgeplan.roofline.passes import weight_bytes

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))
SHAPES = [(16, 256, 256), (23, 384, 128), (40, 192, 64), (1, 96, 32)]  # outputs, inputs, group
KINDS = ["plain", "hierarchical"]
PRODUCTS = [  # kind, outputs, inputs, group, leading shape of x
    ("plain", 16, 256, 256, (5,)),
    ("hierarchical", 16, 256, 256, (67,)),
    ("hierarchical", 23, 384, 128, (2, 9)),
    ("plain", 23, 384, 128, (67,)),
    ("plain", 40, 192, 64, ()),
    ("hierarchical", 40, 192, 64, (5,)),
    ("hierarchical", 1, 96, 32, ()),
    ("plain", 1, 96, 32, (2, 9)),
]


def random_pairs(outputs: int, groups: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale, zero = torch.randn(2, outputs, groups, generator=generator).bfloat16().float()
    return scale, zero


def random_weight(kind: str, outputs: int, inputs: int, group: int, device: str = "cpu") -> tuple[Int8Weight, Tensor]:
    """A random weight, and its definition [outputs, inputs] in float64."""
    codes = torch.randint(256, (outputs, inputs), generator=torch.Generator().manual_seed(inputs))
    scale, zero = random_pairs(outputs, inputs // group, 1)
    wide = lambda pair: pair.double().repeat_interleave(group, dim=1)  # noqa: E731
    if kind == "plain":
        weight = Int8Weight.pack(codes.to(device), scale.to(device), zero.to(device))
        return weight, ((codes - 128) * wide(scale) + wide(zero)).to(device)
    planes = (codes >> 4, scale, zero), (codes & 15, *(pair / 16 for pair in random_pairs(*scale.shape, 2)))
    exact = sum((plane - 8) * wide(scale) + wide(zero) for plane, scale, zero in planes)
    packed = (Int4Weight.pack(*(part.to(device) for part in plane)) for plane in planes)
    return Int8Weight(*packed), exact.to(device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_plain_codes_are_exact(outputs: int, inputs: int, group: int, device: str) -> None:
    weight, exact = random_weight("plain", outputs, inputs, group, device)
    assert torch.allclose(weight.dequantize().double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    padded = -(-outputs // 16) * 16
    assert weight.bytes == padded * inputs * weight_bytes(8, group, 2)
    assert (weight.outputs, weight.inputs, weight.group) == (outputs, inputs, group)


def test_drafts_read_the_upper_plane(device: str) -> None:
    """It is a 4-bit weight of its own: the upper half of every code."""
    codes = torch.randint(256, (16, 128), generator=torch.Generator().manual_seed(0)).to(device)
    weight = Int8Weight.pack(codes, torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device))
    assert torch.equal(weight.upper.unpack().long(), codes // 16)
    assert torch.equal(weight.upper.dequantize(), codes // 16 * 16.0 - 128)


def test_planes_of_two_shapes_are_refused() -> None:
    first, other = (Int4Weight.pack(torch.zeros(16, 128), *torch.zeros(2, 16, 128 // group)) for group in (64, 128))
    with pytest.raises(
        ValueError, match=r"planes of .* \(16, 128, 64, .*\) and \(16, 128, 128, .*\); allowed: equal ones"
    ):
        Int8Weight(first, other)
    elsewhere = replace(first, packed=first.packed.to("meta"))
    with pytest.raises(ValueError, match=r"'cpu'\)\) and .*'meta'\)\); allowed: equal ones"):
        Int8Weight(first, elsewhere)


@pytest.mark.parametrize(("kind", "outputs", "inputs", "group", "shape"), PRODUCTS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.usefixtures("poisoned_empty")
def test_product_equals_the_definition(
    kind: str, outputs: int, inputs: int, group: int, shape: tuple[int, ...], backend: str, device: str
) -> None:
    weight, exact = random_weight(kind, outputs, inputs, group, device)
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-9, 9, outputs, device=device)
    actual = linear_quantized(x, weight, bias, backend=backend)
    assert actual.shape == (*shape, outputs)
    assert relative_error(actual, x.double() @ exact.T + bias) < 1e-5


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_product_in_16_bits(rows: int, backend: str, device: str) -> None:
    weight, exact = random_weight("hierarchical", 50, 256, 64, device)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    actual = linear_quantized(x, weight, backend=backend)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, x.double() @ exact.T) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("outputs", "gated"), [(1, False), (4096, False), (262144, False), (28672, True)])
def test_ctas_fit_an_sm(outputs: int, gated: bool) -> None:
    for rows, inputs in product([1, 5, 8, 9, 16, 64], [32, 576, 4096, 8192, 14336, 28672, 53248]):
        group = next(group for group in (128, 64, 32) if inputs % group == 0)
        schedule = make_quantized_schedule(rows, outputs, inputs, group, True, gated, H200, 8)
        if schedule is None:
            assert gated
            assert rows > MAX_GATED_ROWS or inputs > 8192
            continue
        assert schedule.stages >= schedule.split_k.min_stages >= 2
        assert schedule.shared_bytes + RESERVED_BYTES + BESIDE_BYTES <= H200.sm_bytes
        assert schedule.workers * schedule.max_tiles * 16 >= outputs


def test_a_stage_has_as_many_bytes_as_with_4_bits() -> None:
    four, eight = (make_quantized_schedule(1, 4096, 4096, 128, True, False, H200, bits) for bits in (4, 8))
    assert four is not None and eight is not None
    assert (four.stage_inputs, eight.stage_inputs) == (4096, 2048)
    assert four.stage_bytes == eight.stage_bytes == 32 * (8 * 128 + 64)
    assert "-DCONFIG_WEIGHT_BITS=8" in eight.options


def test_the_launch_passes_both_planes(launches: Any) -> None:
    schedule = make_quantized_schedule(8, 2048, 4096, 128, True, False, H200, 8)
    assert schedule is not None
    upper, lower = torch.zeros(2, 128, 32, 8 * 128 + 64, dtype=torch.uint8)
    LinearKernel("linear", schedule).run(torch.zeros(8, 4096, dtype=torch.bfloat16), upper, lower, bias=None)
    ((_, _, _, params, _, _),) = launches.asked
    assert (params.weight, params.lower) == (upper.data_ptr(), lower.data_ptr())


CUDA_CASES = [  # rows, outputs, inputs, group: odd sizes, all variants, split inputs, several passes
    (1, 16, 128, 128), (3, 23, 96, 32), (12, 80, 4352, 256), (5, 576, 576, 64), (1, 4096, 4096, 128),
    (8, 4096, 4096, 128), (13, 6144, 4096, 128), (16, 1000, 1536, 128), (8, 4096, 14336, 128), (33, 4100, 14336, 128),
    (16, 4096, 8192, 128), (7, 768, 28672, 128), (9, 4096, 4096, 32), (64, 4096, 4096, 64), (2, 32, 53248, 128),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group"), CUDA_CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_definition(
    kind: str, rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    weight, exact = random_weight(kind, outputs, inputs, group, "cuda")
    bias = torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(rows, inputs, device="cuda").to(dtype) / 4096 + 0.001  # sums inside fp16's range
    assert (find_quantized_kernel(x, weight) is None) == (group == 256 and dtype == torch.float16)
    expected = x.double() @ exact.T + bias
    assert relative_error(linear_quantized(x, weight, bias), expected) < torch.finfo(dtype).eps
    assert torch.equal(linear_quantized(x, weight, bias), linear_quantized(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 128), (1216, 576), (9728, 896), (28672, 4096), (3072, 2048)])
@pytest.mark.usefixtures("poisoned_empty")
def test_gated_in_cuda(rows: int, outputs: int, inputs: int) -> None:
    weight, exact = random_weight("hierarchical", outputs, inputs, 64, "cuda")
    x = torch.randn(rows, inputs, device="cuda").bfloat16() / 64 + 0.01
    assert (find_quantized_kernel(x, weight, True) is not None) == (rows <= MAX_GATED_ROWS)
    gate, up = (x.double() @ exact.T).chunk(2, dim=1)
    rounded = 1 if rows <= MAX_GATED_ROWS else 3  # apart, products and gates are rounded before they meet
    actual = linear_quantized(x, weight, gated=True)
    assert relative_error(actual, gate * gate.sigmoid() * up) < rounded * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [MAX_QUANTIZED_ROWS + 1, 2048])
def test_many_rows_go_through_copies(rows: int) -> None:
    weight, exact = random_weight("hierarchical", 1000, 256, 128, "cuda")
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    assert find_quantized_kernel(x, weight) is None
    assert relative_error(linear_quantized(x, weight), x.double() @ exact.T) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_dependent_products_wait_for_each_other(rows: int, chained: Callable[..., None]) -> None:
    def weight(outputs: int, inputs: int) -> Int8Weight:
        codes = torch.randint(256, (outputs, inputs), device="cuda")
        scale = torch.full((outputs, inputs // 128), 0.0125 / inputs**0.5, device="cuda")
        return Int8Weight.pack(codes, scale, scale / 2)

    chained(linear_quantized, weight, rows)
