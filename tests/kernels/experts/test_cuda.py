"""Routed experts in CUDA C++: schedules and launches, and on a GPU the products of codes and of MXFP4."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeplan.kernels.experts import (
    SWIGLU,
    Activation,
    Blocks,
    ExpertStack,
    expert_blocks,
    max_blocks,
    route,
    routed_mlp,
    routed_mlp_reference,
)
from ridgeplan.kernels.experts.cuda import (
    ExpertsKernel,
    ExpertsParams,
    block_rows,
    code_format,
    expert_products,
    find_experts_kernels,
)
from ridgeplan.kernels.experts.schedule import (
    BESIDE_BYTES,
    MAX_BLOCKS,
    MXFP4,
    RESERVED_BYTES,
    CodeFormat,
    ExpertsSchedule,
    make_experts_schedule,
    tiled_format,
)
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.roofline.catalog.layers import Routing

SM_BYTES, NUM_SMS = 228 * 1024, 132
LAYERS = {  # hidden, intermediate, experts, of a token
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3-Next-80B-A3B": (2048, 512, 512, 10),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8),
}
FORMATS = [tiled_format(4, 64), tiled_format(8, 64), MXFP4]


def schedules(name: str, rows: int, weights: CodeFormat) -> tuple[ExpertsSchedule, ExpertsSchedule]:
    """Of both products, which have one."""
    hidden, intermediate, experts, per_token = LAYERS[name]
    blocks = max_blocks(rows * per_token, experts, block_rows(rows))
    sizes = (2 * intermediate, hidden, True), (hidden, intermediate, False)
    first, second = (
        make_experts_schedule(weights, True, *size, blocks, block_rows(rows), NUM_SMS, SM_BYTES) for size in sizes
    )
    assert first is not None and second is not None
    return first, second


@pytest.mark.parametrize("weights", FORMATS, ids=["int4", "int8", "MXFP4"])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_schedules_fit_an_sm(name: str, rows: int, weights: CodeFormat) -> None:
    for schedule in schedules(name, rows, weights):
        per_sm = schedule.ctas_per_sm * (schedule.shared_bytes + RESERVED_BYTES)
        assert per_sm <= SM_BYTES - BESIDE_BYTES
        assert 1 <= schedule.stages_before_x <= schedule.stages_after_x <= schedule.stages
        assert schedule.stages_after_x > 1
        assert schedule.expert_tiles % schedule.tiles == 0
        assert schedule.threads <= 32 * (weights.mma_warps + 2)
        stages = -(-schedule.k_tiles // schedule.stage_k_tiles)
        assert (stages - 1) * schedule.stage_k_tiles < schedule.k_tiles <= stages * schedule.stage_k_tiles


def test_items_take_fewer_tiles_where_these_spread_more_evenly() -> None:
    """128 tiles of 80 blocks on 264 CTAs: 39 items of a tile, or 20 of two."""
    few = schedules("Qwen3-Next-80B-A3B", 8, tiled_format(4, 128))[1]
    assert (few.blocks, few.ctas, few.tiles, few.warps_per_tile) == (80, 264, 1, 4)
    many = schedules("Qwen3-Next-80B-A3B", 4, tiled_format(4, 128))[1]  # 40 blocks: 20 items of a tile, or five of four
    assert (many.blocks, many.tiles, many.warps_per_tile) == (40, 4, 2)


def test_an_sm_takes_one_cta_where_two_do_not_fit() -> None:
    """8 rows of 4096 inputs take 64 KiB."""
    wide, narrow = (schedules(name, 8, tiled_format(4, 128))[0] for name in ("Qwen3-235B-A22B", "Qwen3-30B-A3B"))
    assert (wide.ctas_per_sm, wide.ctas) == (1, NUM_SMS)
    assert (narrow.ctas_per_sm, narrow.ctas) == (2, 2 * NUM_SMS)
    assert wide.stage_bytes > narrow.stage_bytes


@pytest.mark.parametrize(
    ("outputs", "inputs", "blocks"), [(48, 192, 1), (64, 128, MAX_BLOCKS + 1), (16 * 3, 128, 1), (32, 1 << 17, 8)]
)
def test_what_does_not_fit_is_left_to_triton(outputs: int, inputs: int, blocks: int) -> None:
    """Inputs in whole groups, gates and ups in whole tiles, a number of blocks, and rows of x in shared memory."""
    weights = tiled_format(4, 128)
    assert make_experts_schedule(weights, True, outputs, inputs, True, blocks, 8, NUM_SMS, SM_BYTES) is None
    assert make_experts_schedule(weights, True, 64, 256, True, MAX_BLOCKS, 8, NUM_SMS, SM_BYTES) is not None


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (40, 8)])
def test_blocks_are_no_larger_than_the_rows(rows: int, expected: int) -> None:
    assert block_rows(rows) == expected


def test_scales_beyond_the_formats_range_are_left_to_triton() -> None:
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.full((32, 2), 128, dtype=torch.uint8)
    assert code_format(Mxfp4Weight(codes, scales), bf16=True) == MXFP4
    assert code_format(Mxfp4Weight(codes, scales), bf16=False) is None
    assert code_format(Mxfp4Weight(codes, scales + 1), bf16=True) is None
    assert code_format(torch.zeros(2, 16, 64), bf16=True) is None


def test_the_second_product_reads_blocks_before_it_waits(launches: Any) -> None:
    """The first one waits for the kernel that writes them, and only then lets the second start."""
    hidden, intermediate, experts, per_token, rows = 128, 64, 4, 2, 3
    case = weights_of("int4", hidden, intermediate, experts, "cpu")
    stacks, formats = (case.gate_up, case.down), (tiled_format(4, 128), tiled_format(4, 64))
    sizes = (2 * intermediate, hidden, True), (hidden, intermediate, False)
    blocks = expert_blocks(torch.tensor([[0, 1], [1, 2], [3, 1]]), experts, 4)
    both = [
        make_experts_schedule(weights, True, *size, len(blocks.experts), 4, NUM_SMS, SM_BYTES)
        for weights, size in zip(formats, sizes, strict=True)
    ]
    kernels = tuple(ExpertsKernel("experts", schedule) for schedule in both if schedule is not None)
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    y = expert_products(x, blocks, (kernels[0], kernels[1]), stacks, (None, None), rows * per_token, SWIGLU)
    assert y.shape == (rows * per_token, hidden)
    first, second = (params for _, _, _, params, _, early in launches.asked if early)
    assert isinstance(first, ExpertsParams) and isinstance(second, ExpertsParams)
    assert (first.early_blocks, second.early_blocks) == (0, 1)
    assert (first.per_row, second.per_row, first.tiles, second.tiles) == (per_token, 1, 8, 8)
    assert (first.pairs, first.blocks, first.block_rows) == (6, max_blocks(6, experts, 4), 4)
    assert [grid for _, grid, *_ in launches.asked] == [(2 * NUM_SMS, 1, 1)] * 2


@dataclass(frozen=True)
class Case:
    gate_up: ExpertStack
    down: ExpertStack


def stack(kind: str, outputs: int, inputs: int, device: str, seed: int) -> ExpertStack:
    """A random weight of about unit rows, so that results are of the size of x."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(top: int, *shape: int, bottom: int = 0) -> Tensor:
        return torch.randint(bottom, top, shape, dtype=torch.uint8, generator=generator).to(device)

    if kind == "mxfp4":
        exponent = 119 if inputs > 1024 else 121
        return Mxfp4Weight(
            drawn(256, outputs, inputs // 2), drawn(exponent + 4, outputs, inputs // 32, bottom=exponent)
        )
    levels, group = (16, 0) if kind.startswith("int4") else (256, 0)
    group = int(kind.partition("/")[2] or next(size for size in (128, 64, 32) if inputs % size == 0))
    shape = 2, outputs, inputs // group
    scale, zero = (torch.randn(shape, generator=generator) / (levels * inputs**0.5)).to(device) * 4
    pack = Int4Weight.pack if levels == 16 else Int8Weight.pack
    return pack(drawn(levels - 1, outputs, inputs), scale, zero)


def weights_of(kind: str, hidden: int, intermediate: int, experts: int, device: str) -> Case:
    gate_up = stack(kind, experts * 2 * intermediate, hidden, device, 0)
    return Case(gate_up, stack(kind, experts * hidden, intermediate, device, 1))


BF16, FP16 = torch.bfloat16, torch.float16
CUDA_CASES = [  # kind / group, dtype, rows, hidden, intermediate, experts, of a token
    ("int4", BF16, 1, 2048, 768, 16, 8), ("int4", FP16, 3, 2048, 512, 16, 4), ("int4", BF16, 40, 2048, 768, 96, 8),
    ("int4", BF16, 8, 2048, 1408, 16, 6), ("int4/64", BF16, 16, 512, 768, 32, 8), ("int4/32", FP16, 3, 96, 32, 8, 2),
    ("int4", BF16, 1, 128, 64, 4, 1), ("int4", BF16, 8, 4096, 1536, 16, 8), ("int4", BF16, 5, 2880, 2880, 8, 4),
    ("int8", BF16, 1, 2048, 768, 16, 8), ("int8", FP16, 8, 2048, 512, 16, 4), ("int8", BF16, 40, 2048, 1408, 64, 6),
    ("int8/64", FP16, 3, 512, 768, 16, 8), ("int8", BF16, 16, 4096, 1536, 32, 8), ("int8", BF16, 2, 2880, 2880, 8, 4),
    ("mxfp4", BF16, 1, 2880, 2880, 32, 4), ("mxfp4", BF16, 8, 2880, 2880, 16, 4), ("mxfp4", BF16, 40, 512, 768, 48, 4),
    ("mxfp4", BF16, 3, 128, 64, 4, 2),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "skewed"])
@pytest.mark.parametrize(
    ("kind", "dtype", "rows", "hidden", "intermediate", "experts", "per_token"), CUDA_CASES, ids=str
)
@pytest.mark.usefixtures("poisoned_empty")
def test_cuda_equals_the_reference(
    kind: str, dtype: torch.dtype, rows: int, hidden: int, intermediate: int, experts: int, per_token: int, skewed: bool
) -> None:
    """If skewed, one expert has all rows, with biases, an addend, and gpt-oss's activation."""
    torch.manual_seed(rows)
    case = weights_of(kind, hidden, intermediate, experts, "cuda")
    x, addend = torch.randn(2, rows, hidden, device="cuda").to(dtype)
    logits = torch.randn(rows, experts, device="cuda")
    logits[:, 2] += 50 * skewed
    chosen, weights = route(logits, Routing(per_token=per_token))
    more = {}
    if skewed:
        biases = [torch.randn(experts, width, device="cuda").to(dtype) for width in (2 * intermediate, hidden)]
        more = {"gate_up_bias": biases[0], "down_bias": biases[1], "activation": Activation(1.702, 7.0, 1.0)}
        more["addend"] = addend
    assert find_experts_kernels(x, (case.gate_up, case.down), per_token, experts) is not None
    args = chosen, weights, case.gate_up, case.down, experts
    actual = routed_mlp(x, *args, **more)
    wide = {name: each.float() if isinstance(each, Tensor) else each for name, each in more.items()}
    expected = routed_mlp_reference(x.float(), *args, **wide)
    error = float((actual.float() - expected).norm() / expected.norm())
    assert error < torch.finfo(dtype).eps
    assert torch.equal(actual, routed_mlp(x, *args, **more))


@pytest.mark.gpu
def test_no_pairs_of_any_block_are_no_work() -> None:
    """Blocks without pairs are not read, and the kernels end."""
    case = weights_of("int4", 256, 128, 8, "cuda")
    x = torch.randn(4, 256, device="cuda").bfloat16()
    kernels = find_experts_kernels(x, (case.gate_up, case.down), 2, 8)
    assert kernels is not None
    blocks = kernels[0].schedule.blocks
    empty = Blocks(
        torch.full((blocks,), -1, dtype=torch.int32, device="cuda"),
        torch.full((blocks, 4), 8, dtype=torch.int32, device="cuda"),
    )
    expert_products(x, empty, kernels, (case.gate_up, case.down), (None, None), 8, SWIGLU)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int8", "mxfp4"])
def test_captured_layers_follow_their_inputs(kind: str) -> None:
    """Three layers back to back, whose experts depend on the layer before: replays equal one kernel at a time."""
    hidden, intermediate, experts, rows = 512, 256, 16, 4
    layers = [weights_of(kind, hidden, intermediate, experts, "cuda") for _ in range(3)]
    router = torch.randn(hidden, experts, device="cuda")

    def run(x: Tensor, synchronize: bool) -> Tensor:
        for layer in layers:
            chosen, weights = route(x.float() @ router, Routing(per_token=4))
            x = routed_mlp(x, chosen, weights, layer.gate_up, layer.down, experts, addend=x)
            if synchronize:
                torch.cuda.synchronize()
        return x

    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    run(x, synchronize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, synchronize=False)
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, run(x, synchronize=True))
