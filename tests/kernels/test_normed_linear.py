"""Products that norm their input: the definition, what is refused, declared cost, and the kernels that do both."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels import linear_dense_plan, linear_int4_plan
from ridgeplan.kernels.int4_weight import Int4Weight
from ridgeplan.kernels.linear_dense_cuda import fits as dense_fits
from ridgeplan.kernels.linear_int4_cuda import fits as int4_fits
from ridgeplan.kernels.linear_plan import MOST_NORM_PIECES, Machine
from ridgeplan.kernels.norm import Norm, add_rms_norm
from ridgeplan.kernels.normed_linear import normed_linear, normed_linear_cost
from ridgeplan.roofline import ops
from ridgeplan.roofline.passes import weight_bytes

H200 = Machine(shared_bytes=228 * 1024, clusters=(132, 66, 30, 15))
GROUP = 64


def packed(weight: Tensor) -> Int4Weight:
    """4-bit codes from a dense weight's signs and sizes: any will do."""
    codes = (8 + 4 * weight).round().clamp(0, 15).int()
    pairs = torch.full((2, len(weight), weight.shape[1] // GROUP), 0.02, device=weight.device)
    return Int4Weight.pack(codes, *pairs)


def dense(weight: Tensor) -> Tensor:
    """The weight itself."""
    return weight / 8


def definition(hidden: Tensor, norm: Norm, weight: Tensor, bias: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """In float64, but for the sum, which is rounded."""
    total = hidden if norm.update is None else hidden + norm.update
    wide = total.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    out = normed @ weight.double().T + bias.double()
    gate, up = out.chunk(2, dim=-1)
    return total, gate * gate.sigmoid() * up if gated else out


def case(rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype, updated: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(outputs + inputs)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    hidden, update, scale = random(1, rows, inputs), random(1, rows, inputs), random(inputs) / 4 + 1
    norm = Norm(update if updated else None, scale, 1e-5)
    return hidden, norm, random(outputs, inputs), random(outputs)  # type: ignore[return-value]


@pytest.mark.parametrize("form", [dense, packed])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", ["twin", "triton", "auto"])
def test_equals_the_definition(form, gated, updated, rows, backend, device) -> None:  # type: ignore[no-untyped-def]
    hidden, norm, weight, bias = case(rows, 48, 192, device, torch.float32, updated)
    formed = form(weight)
    exact = formed.dequantize() if isinstance(formed, Int4Weight) else formed
    expected = definition(hidden, norm, exact, bias, gated)
    for actual, wanted in zip(
        normed_linear(hidden, norm, formed, bias, gated=gated, backend=backend), expected, strict=True
    ):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [dense, packed])
def test_disagreeing_shapes_are_refused(form: Callable[[Tensor], Tensor | Int4Weight], device: str) -> None:
    hidden, weight, scale = (torch.ones(*shape, device=device) for shape in ((1, 64), (16, 128), (64,)))
    with pytest.raises(ValueError, match=r"x \[1, 64\] does not fit a weight of 128 inputs"):
        normed_linear(hidden, Norm(None, scale, 1e-5), form(weight))
    with pytest.raises(ValueError, match=r"update \[2, 64\] must have the shape of hidden, \[1, 64\]"):
        normed_linear(hidden, Norm(hidden.repeat(2, 1), scale, 1e-5), form(weight))
    with pytest.raises(ValueError, match=r"weight \[32\] does not fit hidden states \[1, 64\]"):
        normed_linear(hidden, Norm(None, scale[:32], 1e-5), form(weight))


@pytest.mark.parametrize("gated", [False, True])
def test_declared_cost_is_the_models(gated: bool) -> None:
    hidden, weight = torch.zeros(1, 128).bfloat16(), torch.zeros(32, 128).bfloat16()
    norm, inside = Norm(hidden, weight[0], 1e-5), ops.norm_inside(1, 128, 2)
    product = ops.gated_linear if gated else ops.linear
    outputs = 16 if gated else 32
    assert normed_linear_cost(hidden, norm, weight, gated) == product(1, 128, outputs, 2, 2) + inside
    codes = product(1, 128, outputs, weight_bytes(4, GROUP, 2), 2)
    assert normed_linear_cost(hidden, norm, packed(weight.float()), gated) == codes + inside


@pytest.mark.parametrize("inputs", [576, 2048, 4096, 8192])
def test_one_row_is_normed_inside(inputs: int) -> None:
    plans = [
        linear_dense_plan.make_plan(1, 4096, inputs, True, H200, normed=True),
        linear_int4_plan.make_plan(1, 4096, inputs, GROUP, True, H200, normed=True),
    ]
    for plan in plans:
        assert plan is not None
        assert plan.cut.splits == plan.shares == plan.tiles == 1
        assert (plan.norm_pieces - 1) * 256 * plan.warps < inputs <= plan.norm_pieces * 256 * plan.warps
        assert plan.norm_pieces <= MOST_NORM_PIECES


def test_more_rows_and_wide_rows_are_not() -> None:
    assert linear_dense_plan.make_plan(2, 4096, 4096, True, H200, normed=True) is None
    assert linear_int4_plan.make_plan(2, 4096, 4096, GROUP, True, H200, normed=True) is None
    assert linear_dense_plan.make_plan(1, 4096, 28672, True, H200, normed=True) is None


CUDA_CASES = [
    (32, 64),
    (960, 576),
    (1536, 896),
    (6144, 4096),
    (28672, 4096),
    (128256, 4096),
    (2560, 2048),
    (4096, 8192),
]


@pytest.mark.gpu
@pytest.mark.parametrize("form", [dense, packed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), CUDA_CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_one_row_in_cuda(form, dtype, outputs: int, inputs: int) -> None:  # type: ignore[no-untyped-def]
    for updated, gated in ((False, False), (True, False), (True, True)):
        hidden, norm, weight, bias = case(1, outputs, inputs, "cuda", dtype, updated)
        formed = form(weight / 8)
        row = Norm(None if norm.update is None else norm.update[0], norm.weight, norm.eps)
        takes = int4_fits if isinstance(formed, Int4Weight) else dense_fits
        assert takes(hidden[0], formed, gated, row)
        before = hidden.clone()
        total, out = normed_linear(hidden, norm, formed, bias, gated=gated)
        exact = formed.dequantize() if isinstance(formed, Int4Weight) else formed
        # What is normed is rounded before the product, as by the kernel that does only that.
        normed = add_rms_norm(hidden, norm.update, norm.weight, norm.eps)
        product = normed[1].double() @ exact.double().T + bias.double()
        gate, up = product.chunk(2, dim=-1)
        expected = gate * gate.sigmoid() * up if gated else product
        assert torch.equal(total, normed[0])
        assert torch.equal(hidden, before)
        assert float((out.double() - expected).norm() / expected.norm()) < 1.2 * torch.finfo(dtype).eps
        again = normed_linear(hidden, norm, formed, bias, gated=gated)
        assert torch.equal(again[0], total)
        assert torch.equal(again[1], out)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [dense, packed])
def test_dependent_products_wait_for_each_other(form, chained: Callable[..., None]) -> None:  # type: ignore[no-untyped-def]
    """Each norms what the one before wrote."""

    def weight(outputs: int, inputs: int) -> Tensor | Int4Weight:
        return form(torch.randn(outputs, inputs, device="cuda").bfloat16() / inputs**0.5)

    def product(x: Tensor, weight: Tensor | Int4Weight) -> Tensor:
        scale = torch.ones(x.shape[-1], device="cuda", dtype=x.dtype)
        return normed_linear(x, Norm(None, scale, 1e-5), weight)[1]

    chained(product, weight, 1)
