"""4-bit weights and their product: packing, reference and kernels, declared cost, CUDA's schedules."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.linear import linear_quantized
from ridgeplan.kernels.linear.cuda import LinearKernel, find_quantized_kernel
from ridgeplan.kernels.linear.schedule import (
    BESIDE_BYTES,
    CLUSTER_SIZES,
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
PRODUCTS = [  # outputs, inputs, group, leading shape of x, bias
    (16, 256, 256, (5,), True),
    (16, 256, 256, (67,), False),
    (23, 384, 128, (2, 9), False),
    (23, 384, 128, (67,), True),
    (40, 192, 64, (), False),
    (40, 192, 64, (2, 9), True),
    (1, 96, 32, (), True),
    (1, 96, 32, (5,), False),
]


def parts(outputs: int, inputs: int, group: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Random codes, scale and zero as `Int4Weight.pack` takes them."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(16, (outputs, inputs), generator=generator)
    scale, zero = torch.randn(2, outputs, inputs // group, generator=generator).bfloat16().float()
    return codes.to(device), scale.to(device), zero.to(device)


def definition(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weight [outputs, inputs] in float64."""
    scale, zero = (pair.double().repeat_interleave(codes.shape[1] // scale.shape[1], dim=1) for pair in (scale, zero))
    return (codes - 8) * scale + zero


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_packing_is_exact(outputs: int, inputs: int, group: int, device: str) -> None:
    codes, scale, zero = parts(outputs, inputs, group, device)
    weight = Int4Weight.pack(codes, scale, zero)
    assert torch.equal(weight.unpack().long(), codes)
    assert all(
        torch.equal(pair.float(), expected) for pair, expected in zip(weight.pairs(), (scale, zero), strict=True)
    )
    assert torch.equal(weight.dequantize(torch.float32), definition(codes, scale, zero).float())
    padded = -(-outputs // 16) * 16
    assert weight.bytes == padded * inputs * weight_bytes(4, group, 2)


@pytest.mark.parametrize(("scales", "message"), [(2, "192 inputs with 2 scales a row"), (5, "5 scales a row")])
def test_other_groups_are_refused(scales: int, message: str) -> None:
    pair = torch.zeros(3, scales)
    with pytest.raises(ValueError, match=f"{message}; allowed are groups of 32, 64, 128, 256"):
        Int4Weight.pack(torch.zeros(3, 192, dtype=torch.int32), pair, pair)


def test_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale \[4, 1\], zero \[4, 1\] do not fit codes \[3, 64\]"):
        Int4Weight.pack(torch.zeros(3, 64), torch.zeros(4, 1), torch.zeros(4, 1))
    weight = Int4Weight.pack(*parts(16, 128, 128))
    with pytest.raises(ValueError, match=r"x \[2, 64\] does not fit a weight of 128 inputs"):
        linear_quantized(torch.zeros(2, 64), weight)
    for bias, given in ((torch.zeros(8), r"\[8\] on cpu"), (torch.zeros(16, device="meta"), r"\[16\] on meta")):
        with pytest.raises(ValueError, match=rf"bias is {given}; allowed: \[16\] on cpu"):
            linear_quantized(torch.zeros(2, 128), weight, bias)


def test_codes_that_do_not_fit_their_bits_are_refused() -> None:
    """They would change the code of the row 8 above."""
    pair = torch.zeros(16, 1)
    for code, bits, pack in ((99, 4, Int4Weight.pack), (-1, 4, Int4Weight.pack), (256, 8, Int8Weight.pack)):
        codes = torch.zeros(16, 128, dtype=torch.int32)
        codes[3, 5] = code
        with pytest.raises(
            ValueError, match=f"codes are {min(code, 0)} to {max(code, 0)}; allowed: 0 to {2**bits - 1}"
        ):
            pack(codes, pair, pair)


def test_planes_that_kernels_would_read_beyond_are_refused() -> None:
    bytes_, sizes = torch.zeros(2, 1, 1088, dtype=torch.uint8), (128, 128, 32)
    Int4Weight(bytes_, *sizes)
    allowed = r"for 32 x 128 in groups of 128; allowed: uint8 \[2, 1, 1088\]"
    for packed, given in ((bytes_[:1], r"torch.uint8 \[1, 1, 1088\]"), (bytes_.bool(), r"torch.bool \[2, 1, 1088\]")):
        with pytest.raises(ValueError, match=f"packed is {given} {allowed}"):
            Int4Weight(packed, *sizes)
    with pytest.raises(ValueError, match=r"for 4096 x 4096 in groups of 128; allowed: uint8 \[256, 32, 1088\]"):
        Int4Weight(bytes_[:1], 128, 4096, 4096)
    with pytest.raises(ValueError, match=r"packed has strides \(2176, 1088, 1\); allowed: contiguous"):
        Int4Weight(bytes_.repeat(1, 2, 1)[:, :1], *sizes)


@pytest.mark.parametrize(("outputs", "inputs", "group", "shape", "biased"), PRODUCTS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.usefixtures("poisoned_empty")
def test_product_equals_the_definition(
    outputs: int, inputs: int, group: int, shape: tuple[int, ...], biased: bool, backend: str, device: str
) -> None:
    codes, scale, zero = parts(outputs, inputs, group, device)
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-9, 9, outputs, device=device) if biased else None
    expected = x.double() @ definition(codes, scale, zero).T + (0 if bias is None else bias)
    actual = linear_quantized(x, Int4Weight.pack(codes, scale, zero), bias, backend=backend)
    assert actual.shape == (*shape, outputs)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_bias_may_be_strided(backend: str, device: str) -> None:
    codes, scale, zero = parts(48, 128, 64, device)
    x, bias = torch.ones(3, 128, device=device), torch.linspace(-9, 9, 96, device=device)[::2]
    expected = x.double() @ definition(codes, scale, zero).T + bias
    assert (
        relative_error(linear_quantized(x, Int4Weight.pack(codes, scale, zero), bias, backend=backend), expected) < 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_product_in_16_bits(dtype: torch.dtype, rows: int, backend: str, device: str) -> None:
    codes, scale, zero = parts(50, 256, 64, device)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    actual = linear_quantized(x, Int4Weight.pack(codes, scale, zero), backend=backend)
    assert actual.dtype == dtype
    # Many rows go through a copy of the weight in x's dtype, whose rounding adds to that of the outputs.
    assert relative_error(actual, x.double() @ definition(codes, scale, zero).T) < torch.finfo(dtype).eps


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_many_rows_take_the_weight_in_slabs(biased: bool, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Slabs of two output tiles, of 50 outputs: the last is part of a tile."""
    monkeypatch.setattr("ridgeplan.kernels.linear.triton.DENSE_COPY_BYTES", 32 * 128 * 4)
    codes, scale, zero = parts(50, 128, 64, device)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-3, 3, 50, device=device) if biased else None
    actual = linear_quantized(x, Int4Weight.pack(codes, scale, zero), bias, backend="triton")
    expected = x.double() @ definition(codes, scale, zero).T + (0 if bias is None else bias)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rows", [1, 70])
def test_gated_products_are_activated(backend: str, rows: int, device: str) -> None:
    codes, scale, zero = parts(64, 128, 64, device)
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-3, 3, 64, device=device)
    gate, up = (x.double() @ definition(codes, scale, zero).T + bias).chunk(2, dim=1)
    actual = linear_quantized(x, Int4Weight.pack(codes, scale, zero), bias, gated=True, backend=backend)
    assert relative_error(actual, gate * gate.sigmoid() * up) < 1e-5


@pytest.mark.parametrize(("outputs", "gated"), [(1, False), (4096, False), (262144, False), (28672, True)])
def test_ctas_fit_an_sm(outputs: int, gated: bool) -> None:
    """Models from 0.1 to 405 billion parameters: every output is some CTA's, within Hopper's shared memory."""
    for rows, inputs in product([1, 5, 8, 9, 16, 64], [32, 576, 4096, 8192, 14336, 28672, 53248]):
        group = next(group for group in (128, 64, 32) if inputs % group == 0)
        schedule = make_quantized_schedule(rows, outputs, inputs, group, True, gated, H200)
        if schedule is None:  # a gate and what it multiplies are in one CTA, which has no room for all inputs of x
            assert gated
            assert rows > MAX_GATED_ROWS or inputs > 8192
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


def test_stages_in_flight_double_in_long_products() -> None:
    """Up to four output tiles a CTA are short. Stages are of 34 KiB, of which 36 KiB hold one and 72 KiB two."""
    tile = 132 * 16  # outputs, one tile for each SM
    short, long = (make_quantized_schedule(1, count * tile, 4096, 128, True, False, H200) for count in (4, 5))
    assert short is not None and long is not None
    assert (short.max_tiles, short.stages_after_x) == (4, 1)
    assert (long.max_tiles, long.stages_after_x) == (5, 2)


def test_stages_are_whole_groups_and_about_equal() -> None:
    """17 groups of 256 inputs are more than a stage of 4096 holds: 9 and 8."""
    schedule = make_quantized_schedule(1, 16, 4352, 256, True, False, H200)
    assert schedule is not None
    assert (schedule.k_tiles, schedule.stage_inputs) == (17, 9 * 256)


@pytest.mark.parametrize(("rows", "passes"), [(1, 1), (16, 1), (17, 2), (64, 4)])
def test_a_pass_over_the_weight_takes_up_to_16_rows(rows: int, passes: int) -> None:
    schedule = make_quantized_schedule(rows, 4096, 4096, 128, True, False, H200)
    assert schedule is not None
    assert schedule.passes == schedule.grid[1] == passes
    assert schedule.x_multicast == (1 if rows == 1 else 2)


def test_inputs_beyond_shared_memory_have_no_schedule() -> None:
    assert make_quantized_schedule(1, 16, 1 << 20, 128, True, False, H200) is None


def test_gates_and_what_they_multiply_in_one_output_tile_have_no_schedule() -> None:
    assert make_quantized_schedule(1, 48, 128, 128, True, True, H200) is None
    assert make_quantized_schedule(1, 64, 128, 128, True, True, H200) is not None


def runs_cuda(x: Tensor, weight: Int4Weight, gated: bool = False) -> bool:
    return find_quantized_kernel(x, weight, gated) is not None


CUDA_CASES = [  # rows, outputs, inputs, group: odd sizes, all variants, split inputs, several passes
    (1, 16, 128, 128), (3, 23, 96, 32), (12, 80, 4352, 256), (5, 576, 576, 64), (1, 4096, 4096, 128),
    (8, 4096, 4096, 128), (13, 6144, 4096, 128), (16, 1000, 1536, 128), (8, 4096, 14336, 128), (33, 4100, 14336, 128),
    (16, 4096, 8192, 128), (7, 768, 28672, 128), (9, 4096, 4096, 32), (64, 4096, 4096, 64), (2, 32, 53248, 128),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group"), CUDA_CASES)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_definition(rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    codes, scale, zero = parts(outputs, inputs, group, "cuda")
    weight, bias = Int4Weight.pack(codes, scale, zero), torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(rows, inputs, device="cuda").to(dtype) / 64 + 0.01  # sums that do not cancel, inside fp16's range
    assert runs_cuda(x, weight)
    expected = x.double() @ definition(codes, scale, zero).T + bias
    assert relative_error(linear_quantized(x, weight, bias), expected) < torch.finfo(dtype).eps
    assert torch.equal(linear_quantized(x, weight, bias), linear_quantized(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 128), (1216, 576), (9728, 896), (28672, 4096), (3072, 2048)])
@pytest.mark.usefixtures("poisoned_empty")
def test_gated_in_cuda(rows: int, outputs: int, inputs: int) -> None:
    codes, scale, zero = parts(outputs, inputs, 64, "cuda")
    weight, bias = Int4Weight.pack(codes, scale, zero), torch.randn(outputs, device="cuda").bfloat16()
    x = torch.randn(rows, inputs, device="cuda").bfloat16() / 64 + 0.01
    assert runs_cuda(x, weight, gated=True) == (rows <= MAX_GATED_ROWS)
    gate, up = (x.double() @ definition(codes, scale, zero).T + bias).chunk(2, dim=1)
    actual = linear_quantized(x, weight, bias, gated=True)
    rounded = 1 if rows <= MAX_GATED_ROWS else 3  # apart, products and gates are rounded before they meet
    assert relative_error(actual, gate * gate.sigmoid() * up) < rounded * torch.finfo(torch.bfloat16).eps
    assert torch.equal(actual, linear_quantized(x, weight, bias, gated=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, MAX_QUANTIZED_ROWS + 1])
def test_what_the_cuda_kernel_leaves_to_others(rows: int) -> None:
    codes, scale, zero = parts(100, 256, 128, "cuda")
    weight = Int4Weight.pack(codes, scale, zero)
    wide = torch.randn(rows * 256 + 1, device="cuda", dtype=torch.bfloat16)
    for x in (
        wide[1:].view(rows, 256),
        torch.randn(MAX_QUANTIZED_ROWS + rows, 256, device="cuda"),
        wide[:0].view(0, 256),
    ):
        assert not runs_cuda(x, weight)
        expected = x.double() @ definition(codes, scale, zero).T
        assert (linear_quantized(x, weight) - expected).norm() <= 1e-2 * expected.norm()
    assert not runs_cuda(
        wide[: rows * 256].view(rows, 256), Int4Weight.pack(*parts(100, 256, 128))
    )  # of the host's memory


@pytest.mark.gpu
def test_a_captured_product_follows_its_inputs() -> None:
    """No state between calls and no host synchronization: replays equal fresh calls."""
    weight = Int4Weight.pack(*parts(512, 14336, 128, "cuda"))
    x = torch.randn(8, 14336, device="cuda", dtype=torch.bfloat16)
    linear_quantized(x, weight)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_quantized(x, weight)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, linear_quantized(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_dependent_products_wait_for_each_other(rows: int, chained: Callable[..., None]) -> None:
    def weight(outputs: int, inputs: int) -> Int4Weight:
        codes = torch.randint(16, (outputs, inputs), device="cuda")
        scale = torch.full((outputs, inputs // 128), 0.2 / inputs**0.5, device="cuda")
        return Int4Weight.pack(codes, scale, scale / 2)

    chained(linear_quantized, weight, rows)


@pytest.mark.parametrize("gated", [False, True])
def test_the_launch_passes_the_schedule(gated: bool, launches: Any) -> None:
    """Eight rows of 4096 inputs: pairs of CTAs fetch x together, and 128 output tiles are fewer than SMs."""
    schedule = make_quantized_schedule(8, 2048, 4096, 128, True, gated, H200)
    assert schedule is not None
    weight = Int4Weight(torch.zeros(128, 32, 8 * 128 + 64, dtype=torch.uint8), 128, 4096, 2048)
    x, bias = torch.zeros(8, 4096, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
    y = LinearKernel("linear", schedule).run(x, weight.packed, bias=None if gated else bias)
    ((kernel, grid, threads, params, shared_bytes, early),) = launches.asked
    assert y.shape == (8, 1024 if gated else 2048)
    assert (kernel, grid, threads, early) == ("linear", (64 if gated else 128, 1, 1), 32 * (8 + 2), True)
    assert (params.x, params.weight, params.y) == (x.data_ptr(), weight.packed.data_ptr(), y.data_ptr())
    assert params.bias == (None if gated else bias.data_ptr())
    assert (params.rows, params.inputs, params.outputs, params.rows_per_pass) == (8, 4096, 2048, 8)
    assert params.max_tiles == (2 if gated else 1)
    # A stage is 4096 inputs of an output tile: 32 groups of 128, with 8 bytes of codes an input and 64 of scales.
    # Beside are rows of x, which start an odd number of 64 bytes apart, its sums for each group, and two buffers of the
    # warps'.
    stage, beside = 32 * (8 * 128 + 64), 8 * (2 * 4096 + 64) + 32 * 8 * 4 + 2 * 8 * 16 * 8 * 4
    assert params.stages == (228 * 1024 - 8 * 1024 - beside) // stage
    assert shared_bytes == params.stages * stage + beside
    assert (params.stages_before_x, params.stages_after_x, params.trigger_stages) == (1, 1, 0)
