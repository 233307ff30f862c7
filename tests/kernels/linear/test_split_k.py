"""Triton's product with quantized weights, whose inputs are split between programs."""

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear import triton as kernels
from ridgeplan.kernels.linear.triton import FEW_ROWS, FLOAT32, INTEGERS, MANY_ROWS, SplitKConfig, config_of
from ridgeplan.kernels.linear.weights import CHUNK, Int4Weight, Int8Weight


def weight_of(bits: int, outputs: int, inputs: int, group: int, device: str) -> Int4Weight | Int8Weight:
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(1 << bits, (outputs, inputs), generator=generator).to(device)
    scale, zero = torch.randn(2, outputs, inputs // group, generator=generator).to(device) / 2**bits
    return (Int8Weight if bits == 8 else Int4Weight).pack(codes, scale, zero)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("config", "outputs", "inputs", "splits"),
    [
        (FEW_ROWS, 4096, 4096, 16),  # 64 programs
        (FEW_ROWS, 28672, 4096, 8),  # 448
        (FEW_ROWS, 128256, 4096, 2),  # 2004
        (FEW_ROWS, 262144, 4096, 1),  # 4096
        (FEW_ROWS, 16, 192, 4),  # three chunks of inputs, so one program of four has none
        (FEW_ROWS, 16, 64, 1),
        (MANY_ROWS, 4096, 4096, 8),  # 64 programs
        (MANY_ROWS, 10240, 8192, 4),  # 160
        (MANY_ROWS, 128256, 4096, 1),
        (FLOAT32, 4096, 4096, 4),  # 128
    ],
)
def test_few_programs_split_the_inputs(config: SplitKConfig, outputs: int, inputs: int, splits: int) -> None:
    programs = -(-outputs // (16 * config.tiles))
    assert config.splits(programs, inputs // CHUNK) == splits


@pytest.mark.parametrize(
    ("rows", "dtype", "config"),
    [(1, torch.bfloat16, INTEGERS), (16, torch.float16, INTEGERS), (17, torch.bfloat16, MANY_ROWS),
     (1, torch.float32, FLOAT32), (64, torch.float32, FLOAT32)],
)  # fmt: skip
def test_programs_hold_as_many_rows_as_there_are(rows: int, dtype: torch.dtype, config: SplitKConfig) -> None:
    assert config_of(torch.empty(rows, 64, dtype=dtype)) is config


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 9, 18])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.usefixtures("poisoned_empty")
def test_any_number_of_splits_equals_the_definition(
    bits: int, rows: int, splits: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Five chunks of inputs, of which splits get different numbers or none; rows and outputs of a part of a tile."""
    monkeypatch.setattr(SplitKConfig, "splits", lambda *_: splits)
    weight = weight_of(bits, 71, 320, 64, device)
    x = torch.randn(rows, 320, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    bias = torch.linspace(-9, 9, 71, device=device).bfloat16()
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    actual = linear_quantized(x, weight, bias, backend="triton")
    assert relative_error(actual, expected) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("rows", [1, 9])
def test_an_element_is_exact_to_a_share_of_its_groups_largest(rows: int, device: str) -> None:
    """Each output is one element of x, beside outliers 3000 times as large in every second group."""
    output, group, place = torch.arange(70), torch.arange(70) % 3, torch.arange(70) * 7 % 64
    codes = torch.full((70, 3, 128), 8)  # weights of 0
    codes[output, group, place] = 9
    ones = torch.ones(70, 3, device=device)
    x = torch.randn(rows, 3, 128, generator=torch.Generator().manual_seed(2))
    x[:, ::2, 70] *= 3000
    x = x.half()  # to bfloat16 the interpreter truncates
    weight = Int4Weight.pack(codes.flatten(1).to(device), ones, torch.zeros_like(ones))
    actual = linear_quantized(x.flatten(1).to(device), weight, backend="triton").double().cpu()
    expected, largest = x[:, group, place].double(), x.double().abs().amax(-1)[:, group]
    rounding = torch.finfo(x.dtype).eps / 2 * expected.abs()
    assert ((actual - expected).abs() <= 1.01 * (largest / 64516 + rounding)).all()


def test_sums_of_splits_stay_in_float32(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Beside 4096, bfloat16 has steps of 32, so that 12, 12 and 8 would be lost one by one."""
    monkeypatch.setattr(SplitKConfig, "splits", lambda *_: 4)
    ones = torch.ones(16, 1, device=device).expand(16, 4)
    weight = Int4Weight.pack(torch.full((16, 256), 9, device=device), ones.contiguous(), torch.zeros_like(ones))
    x = torch.zeros(1, 256, device=device, dtype=torch.bfloat16)
    x[0, ::64] = torch.tensor([4096.0, 12, 12, 8], device=device)
    assert linear_quantized(x, weight, backend="triton").tolist() == [[4128.0] * 16]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [2, 17], ids=["integers", "bf16"])
def test_what_is_not_finite_stays_so(rows: int, number: float, device: str) -> None:
    x = torch.ones(rows, 256, device=device).bfloat16()
    x[1, 200] = number
    y = linear_quantized(x, weight_of(4, 16, 256, 128, device), backend="triton")
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 4096, 4096), (16, 1000, 8192), (33, 4100, 4096)])
@pytest.mark.usefixtures("poisoned_empty")
def test_large_products_are_right_and_always_the_same(
    bits: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    weight = weight_of(bits, outputs, inputs, 128, "cuda")
    x = torch.randn(rows, inputs, device="cuda").to(dtype) / 64 + 0.01
    product = kernels.linear_quantized_triton(x, weight, None)
    assert relative_error(product, x.double() @ weight.dequantize().double().T) < max(torch.finfo(dtype).eps, 1e-5)
    assert all(torch.equal(product, kernels.linear_quantized_triton(x, weight, None)) for _ in range(20))
