"""Dense products of few rows: the definition, declared cost, CUDA's schedules and kernel, chains that overlap."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeplan.kernels.linear import linear_dense
from ridgeplan.kernels.linear.cuda import find_dense_kernel
from ridgeplan.kernels.linear.schedule import (
    BESIDE_BYTES,
    CLUSTER_SIZES,
    MAX_DENSE_ROWS,
    RESERVED_BYTES,
    DeviceLimits,
    make_dense_schedule,
)

H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def case(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose products neither cancel nor leave fp16's range."""
    generator = torch.Generator(device).manual_seed(rows + outputs + inputs)
    x, weight = (torch.randn(count, inputs, generator=generator, device=device).to(dtype) for count in (rows, outputs))
    return x / 8 + 0.01, weight / 8 + 0.01, torch.linspace(-2, 2, outputs, device=device).to(dtype)


def definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32 where float64 would not fit; its error is far below a rounding to 16 bits."""
    wide = torch.float64 if weight.numel() < 1 << 26 else torch.float32
    return functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).double()


@pytest.mark.parametrize("shape", [(), (5,), (2, 9)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_product_equals_the_definition(shape: tuple[int, ...], biased: bool, device: str) -> None:
    x, weight, bias = (tensor.float() for tensor in case(1, 48, 96, torch.float32, device))
    x = x[0].expand(*shape, 96)
    actual = linear_dense(x, weight, bias if biased else None)
    assert actual.shape == (*shape, 48)
    assert relative_error(actual, definition(x, weight, bias if biased else None)) < 1e-5


def test_disagreeing_shapes_and_unknown_backends_are_refused() -> None:
    weight = torch.zeros(16, 128)
    with pytest.raises(ValueError, match=r"x \[2, 64\] does not fit a weight of 128 inputs"):
        linear_dense(torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match=r"bias is \[8\] on \w+; allowed: \[16\]"):
        linear_dense(torch.zeros(2, 128), weight, torch.zeros(8))
    with pytest.raises(ValueError, match="backend 'cublas' is none of"):
        linear_dense(torch.zeros(2, 128), weight, backend="cublas")  # type: ignore[arg-type]


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_gated_products_are_activated(biased: bool, device: str) -> None:
    x, weight, bias = (tensor.float() for tensor in case(3, 48, 96, torch.float32, device))
    gate, up = definition(x, weight, bias if biased else None).chunk(2, dim=1)
    actual = linear_dense(x, weight, bias if biased else None, gated=True)
    assert relative_error(actual, gate * gate.sigmoid() * up) < 1e-5


@pytest.mark.parametrize(("outputs", "gated"), [(1, False), (4096, False), (262144, False), (28672, True)])
def test_ctas_fit_an_sm(outputs: int, gated: bool) -> None:
    for rows, inputs in product(range(1, MAX_DENSE_ROWS + 1), [32, 576, 4096, 8192, 14336, 28672]):
        schedule = make_dense_schedule(rows, outputs, inputs, True, gated, H200)
        if schedule is None:  # the library's product is as fast, or a cluster's sums of many output tiles leave no room
            assert rows > 2
            assert max(inputs, outputs) > 8192
            continue
        assert not gated or schedule.split_k.ways == 1
        assert schedule.stages >= schedule.split_k.min_stages >= 2
        assert 1 <= schedule.stages_before_x <= schedule.stages
        assert 1 <= schedule.stages_after_x <= schedule.stages
        assert schedule.rows_per_pass <= min(rows, 8 * schedule.x_tiles)
        assert schedule.shared_bytes + RESERVED_BYTES + BESIDE_BYTES <= H200.sm_bytes
        size = schedule.split_k.ways * schedule.x_multicast
        assert schedule.workers % schedule.x_multicast == 0
        assert (
            schedule.workers * schedule.split_k.ways * schedule.passes
            <= size * H200.clusters[CLUSTER_SIZES.index(size)]
        )  # resident at once
        assert schedule.workers * schedule.max_tiles * 16 >= outputs
        assert (
            schedule.workers * (schedule.max_tiles - (2 if gated else 1)) * 16 < outputs
        )  # as csrc/pipeline.cuh counts


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "taken"),
    [
        (16, 8192, 8192, True),
        (8, 28672, 4096, True),  # of many outputs or inputs, eight rows
        (9, 28672, 4096, False),
        (9, 4096, 14336, False),
        (4, 49152, 576, True),  # of many outputs and few inputs, four
        (5, 49152, 576, False),
        (16, 1536, 576, True),
        (17, 64, 64, False),
    ],
)
def test_the_library_takes_what_it_is_as_fast_at(rows: int, outputs: int, inputs: int, taken: bool) -> None:
    assert (make_dense_schedule(rows, outputs, inputs, True, False, H200) is not None) == taken


def test_warps_divide_a_stage_evenly() -> None:
    """Of 18 K tiles three warps take six each, where four would take four or five; of 12 or 19 four are faster."""
    schedules = {inputs: make_dense_schedule(1, 64, inputs, True, False, H200) for inputs in (384, 576, 608)}
    assert {inputs: schedule and schedule.mma_warps for inputs, schedule in schedules.items()} == {
        384: 4,
        576: 3,
        608: 4,
    }


def runs_cuda(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    return find_dense_kernel(x, weight, gated) is not None


CUDA_CASES = [  # outputs, inputs: tiny models, odd sizes, all cuts
    (576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (896, 896), (4864, 896), (896, 4864),
    (151936, 896), (23, 32), (1, 64), (4100, 4096), (6144, 4096), (4096, 14336), (40, 28672), (128256, 4096),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), CUDA_CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_definition(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(MAX_DENSE_ROWS + 1, outputs, inputs, dtype, "cuda")
    expected = definition(x, weight, bias)
    taken = [rows for rows in range(1, MAX_DENSE_ROWS + 1) if runs_cuda(x[:rows], weight)]
    assert taken or outputs * inputs < 1 << 20
    for rows in taken:
        actual = linear_dense(x[:rows], weight, bias)
        assert relative_error(actual, expected[:rows]) < torch.finfo(dtype).eps, rows
        assert torch.equal(actual, linear_dense(x[:rows], weight, bias)), rows
    assert not runs_cuda(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (3072, 576), (9728, 896), (28672, 4096)])
@pytest.mark.usefixtures("poisoned_empty")
def test_gated_in_cuda(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = case(MAX_DENSE_ROWS, outputs, inputs, dtype, "cuda")
    x, bias = x - 0.01, bias * 0  # gates of both signs, and so what they multiply
    gate, up = definition(x / 8, weight, bias).chunk(2, dim=1)
    expected = gate * gate.sigmoid() * up
    taken = [rows for rows in range(1, MAX_DENSE_ROWS + 1) if runs_cuda(x[:rows], weight, gated=True)]
    assert taken[:2] == [1, 2]
    for rows in taken:
        actual = linear_dense(x[:rows] / 8, weight, bias, gated=True)
        assert relative_error(actual, expected[:rows]) < torch.finfo(dtype).eps, rows
        assert torch.equal(actual, linear_dense(x[:rows] / 8, weight, bias, gated=True)), rows


@pytest.mark.gpu
def test_shapes_and_strides_of_x() -> None:
    x, weight, _ = case(8, 4096, 4096, torch.bfloat16, "cuda")
    expected = linear_dense(x, weight)
    assert torch.equal(linear_dense(x.view(2, 4, 4096), weight), expected.view(2, 4, 4096))
    strided = torch.stack([x, x], dim=1)[:, 0]
    assert not runs_cuda(strided, weight)
    assert relative_error(linear_dense(strided, weight), expected.double()) < 1e-2
    odd = torch.empty(8 * 4096 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(8, 4096).copy_(x)
    assert not runs_cuda(odd, weight)
    assert not runs_cuda(x, weight.t())
    assert not runs_cuda(x, weight.half())
    assert linear_dense(x[:0], weight).shape == (0, 4096)


@pytest.mark.gpu
def test_a_captured_product_follows_its_inputs() -> None:
    """No state between calls and no host synchronization: replays equal fresh calls."""
    x, weight, bias = case(8, 4096, 14336, torch.bfloat16, "cuda")
    linear_dense(x, weight, bias)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_dense(x, weight, bias)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, linear_dense(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_dependent_products_wait_for_each_other(rows: int, chained: Callable[..., None]) -> None:
    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5

    chained(linear_dense, weight, rows)
